"""Ranks that are processes meet, leave, and notice who was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from torch import multiprocessing

from hubring.ps.core.errors import HubringError
from hubring.workers.collectives import barrier
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.group import RingStore
from tests.contract.models import attached
from tests.support.training.notes import FileNotes
from tests.support.training.ranks import LIMIT


def ring_rank(rank: int, folder: Path, told: Any, how: str) -> None:
    """Averages once; then rank 1 dies, and rank 0 tells what it met."""
    store = RingStore(FileNotes(folder), "ring", LIMIT)
    communicator = AllreduceCommunicator(rank, 2, store, host="127.0.0.1", timeout=LIMIT)
    (bucket,) = attached(communicator, bucket_bytes=1 << 20)
    bucket.gradients.fill_(rank)
    communicator.push_pull(bucket, {}).wait(LIMIT)
    told.put((rank, bucket.gradients.tolist()))
    if how == "leave":
        communicator.close(finished=True)
        return
    if rank == 1:
        told.close()
        told.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.ring.operations.lost.add(1)
    try:
        if how == "die before a barrier":
            barrier(communicator=communicator)
        communicator.push_pull(bucket, {}).wait(LIMIT)
    except HubringError as error:
        told.put((type(error).__name__, str(error)))
    communicator.close(finished=False)
    told.close()
    told.join_thread()
    # As workers end: threads that a broken ring leaves in torch may abort whoever ends in good order.
    os._exit(0)


@pytest.fixture(scope="session")
def forking() -> Any:
    """Starts processes that have imported torch; what forks them stays as long as this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    forkserver.ensure_running()
    return context


@pytest.fixture
def two_processes(forking: Any, tmp_path: Path) -> Iterator[Callable[[str], tuple[list[Any], Any]]]:
    told = forking.Queue()
    started: list[Any] = []

    def start(how: str) -> tuple[list[Any], Any]:
        started.extend(forking.Process(target=ring_rank, args=(rank, tmp_path, told, how)) for rank in (0, 1))
        for process in started:
            process.start()
        return started, told

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_processes_meet_and_leave(two_processes: Any) -> None:
    processes, told = two_processes("leave")
    assert dict(told.get(timeout=60) for _ in processes) == {rank: [0.5] * 8 for rank in (0, 1)}
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0


@pytest.mark.slow
def test_a_killed_rank_is_noticed_at_once_and_named(two_processes: Any) -> None:
    processes, told = two_processes("die")
    assert dict(told.get(timeout=60) for _ in processes) == {rank: [0.5] * 8 for rank in (0, 1)}
    kind, text = told.get(timeout=LIMIT / 2)  # well before the ring's own timeout
    assert kind == "RingBroken"
    assert "rank 0: the exchange of bucket 0 failed because a member of the ring is lost (rank 1)" in text
    processes[0].join(LIMIT)
    assert processes[0].exitcode == 0


@pytest.mark.slow
def test_a_killed_rank_is_noticed_at_once_by_who_waits_at_a_barrier(two_processes: Any) -> None:
    processes, told = two_processes("die before a barrier")
    assert dict(told.get(timeout=60) for _ in processes) == {rank: [0.5] * 8 for rank in (0, 1)}
    kind, text = told.get(timeout=LIMIT / 2)
    assert kind == "RingBroken"
    assert "rank 0: agreeing on collectives failed because a member of the ring is lost" in text
    processes[0].join(LIMIT)
    assert processes[0].exitcode == 0
