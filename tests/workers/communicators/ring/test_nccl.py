"""What a ring over NCCL does around torch's calls, with stand-ins for them; no GPU is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from hubring.ps.config.environment import let_nccl_heal
from hubring.ps.core.errors import DeadlineExceeded, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring import process_group
from hubring.workers.communicators.ring.group import RingStore, connect_nccl
from hubring.workers.communicators.ring.process_group import Witness
from hubring.workers.communicators.ring.work import ConfirmedWait, Operations, RingWork
from tests.support.training.notes import SharedNotes
from tests.support.training.ranks import LIMIT
from tests.support.training.rings import CPU, on_threads, ring_of


class Group:
    """A group whose first operation does what a test says."""

    def __init__(self, operation: Callable[[], object]) -> None:
        self._operation = operation
        self.aborted = threading.Event()

    def allreduce(self, _: object) -> Group:
        return self

    def wait(self) -> None:
        self._operation()

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The current devices that threads have set."""
    found: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


def connect(group: Group, timeout: float = LIMIT, watch: Work | None = None) -> None:
    store = RingStore(SharedNotes(), "ring", LIMIT)
    connect_nccl(group, store, CPU, timeout, watch or Work("a watch"))


def test_an_error_of_nccl_breaks_the_ring() -> None:
    def fails() -> None:
        raise RuntimeError("no network")

    group = Group(fails)
    with pytest.raises(RingBroken, match="no network"):
        connect(group)
    assert group.aborted.wait(LIMIT)


@pytest.mark.parametrize("lost", [True, False])
def test_a_member_that_is_lost_or_late_ends_the_wait_and_the_group_is_aborted_later(lost: bool) -> None:
    come, watch = threading.Event(), Work("a watch")
    group = Group(come.wait)
    if lost:
        watch.fail(RingBroken("rank 1 is lost"))
    with pytest.raises(RingBroken if lost else DeadlineExceeded, match="rank 1 is lost" if lost else None):
        connect(group, LIMIT if lost else 0.05, watch)
    assert not group.aborted.is_set()
    come.set()
    assert group.aborted.wait(LIMIT)


class Stream:
    """A stream, an event on it, and torch's handle of an operation; `log` has what they were asked for."""

    def __init__(self, log: list[str], device: object) -> None:
        self.log, self.device = log, device

    def query(self) -> bool:
        self.log.append("query")
        return self.log[-2] == "query"

    def block_current_stream(self) -> None:
        self.log.append("block")

    def record_event(self, event: object) -> Stream:
        self.log.append("record")
        return self

    def wait(self) -> None:
        self.log.append("wait")


GPU = torch.device("cuda", 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU's streams, events and handles, which are stand-ins, were asked for."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, device))
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return log


def test_a_gpus_operation_is_done_once_it_has_ended_and_all_have_confirmed_it(
    asked: list[str], devices: list[object]
) -> None:
    operations = Operations(0, ConfirmedWait(GPU, lambda: asked.append("confirm"), LIMIT))
    work = RingWork("a sum", lambda: asked.append("divide"))
    assert operations.begin(work)
    work.when_done(lambda _: asked.append("done"))
    operations.follow(work, Stream(asked, GPU))
    work.wait(LIMIT)
    operations.close()
    passed = ["record", "query", "query"]
    assert asked == ["block", *passed, "divide", *passed, "confirm", "done"]
    assert devices == [GPU]


def test_an_operation_of_a_gpu_that_does_not_end_breaks_the_ring(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "query", lambda _: False)
    wait = ConfirmedWait(GPU, lambda: pytest.fail("it has not ended"), timeout=0.01)
    with pytest.raises(RingBroken, match=r"a sum took longer than 0\.01 s"):
        wait(RingWork("a sum"), Stream(asked, GPU))


def test_nothing_is_confirmed_after_an_operation_that_failed() -> None:
    confirmed: list[str] = []
    operations = Operations(0, ConfirmedWait(CPU, lambda: confirmed.append("confirm"), LIMIT))
    broken, later = RingWork("a sum"), RingWork("a later sum")

    class Raises:
        def wait(self) -> None:
            raise RuntimeError("NCCL error")

    for work in (broken, later):
        assert operations.begin(work)
    operations.follow(broken, Raises())
    operations.follow(later, Stream([], CPU))
    assert operations.end_thread(LIMIT)
    assert broken.error is not None
    assert later.error is not None
    assert confirmed == []


def witnesses() -> list[Witness]:
    store = RingStore(SharedNotes(), "ring", LIMIT)
    opened = on_threads(2, lambda rank: Witness(ring_of(rank, store)))
    return [each.result(LIMIT) for each in opened]


def test_nothing_is_confirmed_by_a_member_that_leaves() -> None:
    first, second = witnesses()
    thread = threading.Thread(target=first.leave)
    thread.start()
    with pytest.raises(RingBroken, match="leaves before"):
        second.confirm()
    thread.join(LIMIT)
    for each in (first, second):
        each.abort(RingBroken("the test is over"))


def test_a_member_that_leaves_alone_does_not_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "LEAVE_SECONDS", 0.05)
    first, second = witnesses()
    first.leave()
    first.abort(RingBroken("left"))
    with pytest.raises(RingBroken):
        second.confirm()
    second.abort(RingBroken("the test is over"))


@pytest.mark.parametrize(("own", "expected"), [(None, "0"), ("1", "1")])
def test_variables_let_a_ring_over_nccl_heal(
    own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", own or "")
    if own is None:
        monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    let_nccl_heal()
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ["NCCL_RUNTIME_CONNECT"] == expected
