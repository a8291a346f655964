"""A ring that breaks, or is left, ends what waits on it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, RingBroken
from hubring.workers.collectives import allreduce_async, barrier, recv_async
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.ring.work import RingWork
from tests.contract.models import attached
from tests.support.training.notes import SharedNotes
from tests.support.training.ranks import LIMIT, Ranks


def test_a_failed_operation_fails_all_waiting_operations_with_its_reason(ring: Ranks) -> None:
    def action(communicator: Communicator) -> list[str]:
        assert isinstance(communicator, AllreduceCommunicator)

        def bad() -> None:
            raise ValueError("seven is not a codec")

        told = []
        first, second = RingWork("the first", bad), RingWork("the second")
        tensor = torch.ones(2)
        for work in (first, second):
            communicator.ring.start(work, lambda group: group.allreduce([tensor]))
        for work in (first, second):
            with pytest.raises(RingBroken, match="seven is not a codec") as raised:
                work.wait(LIMIT)
            told.append(str(raised.value))
        return told

    for told in ring.run(action):
        assert all("the first failed" in each for each in told)


def test_failing_a_ring_ends_what_is_pending_and_whatever_comes_later(ring: Ranks) -> None:
    may_leave = threading.Event()

    def action(communicator: Communicator) -> None:
        assert isinstance(communicator, AllreduceCommunicator)
        buckets = attached(communicator)
        if communicator.rank != 0:
            may_leave.wait(LIMIT)
            return
        pending = [
            communicator.push_pull(buckets[0], {}),
            allreduce_async(torch.ones(2), communicator=communicator),
            recv_async(1, communicator=communicator),
        ]
        assert not any(work.done for work in pending)
        communicator.fail(RingBroken("rank 1 stands still"))
        try:
            for work in (*pending, communicator.push_pull(buckets[1], {})):
                with pytest.raises(RingBroken, match="rank 1 stands still"):
                    work.wait(LIMIT)
            with pytest.raises(RingBroken, match="rank 1 stands still"):
                barrier(communicator=communicator)
        finally:
            may_leave.set()

    ring.run(action)


def test_leaving_a_ring_fails_the_ranks_pending_operations(ring: Ranks) -> None:
    has_left = threading.Event()

    def action(communicator: Communicator) -> None:
        barrier(communicator=communicator)
        if communicator.rank != 0:
            has_left.wait(LIMIT)
            return
        work = allreduce_async(torch.ones(2), communicator=communicator)
        communicator.close(finished=True)
        has_left.set()
        with pytest.raises(RingBroken, match="rank 0 has left the ring"):
            work.wait(LIMIT)

    ring.run(action)


@pytest.mark.parametrize("ring", ["ring", "ring gloo"], indirect=True)  # two levels cut off other hosts
def test_a_slow_member_is_not_called_lost(ring: Ranks) -> None:
    """The group's own timeout ends an operation of a member that the others still wait for."""
    together = threading.Barrier(ring.size, timeout=LIMIT)

    def action(communicator: Communicator) -> None:
        assert isinstance(communicator, AllreduceCommunicator)
        bucket, *_ = attached(communicator)
        together.wait()
        try:
            if communicator.rank != 1:
                communicator.ring._group.set_timeout(timedelta(seconds=0.1))
                with pytest.raises(DeadlineExceeded, match=r"Timed out.*; raise --timeout"):
                    communicator.push_pull(bucket, {}).wait(LIMIT)
        finally:
            together.wait()

    ring.run(action)


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("mpi", "use shm, gloo or nccl"),
        pytest.param(
            "nccl",
            "backend nccl",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to reduce on"),
        ),
    ],
)
def test_an_unknown_backend_and_nccl_without_a_gpu_are_refused(backend: str, says: str) -> None:
    store = RingStore(SharedNotes(), "ring", LIMIT)
    with pytest.raises(ConfigError, match=says):
        AllreduceCommunicator(0, 1, store, backend=backend, host="127.0.0.1").connect()
