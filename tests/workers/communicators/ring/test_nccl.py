"""What a ring over NCCL does around torch's calls, with stand-ins for them; no GPU is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from hubring.ps.config.environment import let_nccl_heal
from hubring.ps.core.errors import ConfigError, DeadlineExceeded, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.ring.nccl import groups, witness
from hubring.workers.communicators.ring.nccl.confirmed_wait import ConfirmedWait
from hubring.workers.communicators.ring.nccl.witness import Witness
from hubring.workers.communicators.ring.work import Operations, RingWork
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
    groups.connect(group, store, CPU, timeout, watch or Work("a watch"))


def test_a_group_connects_in_its_first_operation(devices: list[object]) -> None:
    group = Group(lambda: None)
    connect(group)
    assert devices == [CPU]
    assert not group.aborted.is_set()


def test_an_error_of_nccl_breaks_the_ring() -> None:
    def fails() -> None:
        raise RuntimeError("no network")

    group = Group(fails)
    with pytest.raises(RingBroken, match="no network"):
        connect(group)
    assert group.aborted.wait(LIMIT)


def test_a_member_that_is_lost_meanwhile_ends_the_wait_and_its_late_group_is_aborted() -> None:
    come, watch = threading.Event(), Work("a watch")
    group = Group(come.wait)
    watch.fail(RingBroken("rank 1 is lost"))
    with pytest.raises(RingBroken, match="rank 1 is lost"):
        connect(group, watch=watch)
    assert not group.aborted.is_set()
    come.set()
    assert group.aborted.wait(LIMIT)


def test_a_member_that_does_not_come_ends_the_wait_in_time() -> None:
    come = threading.Event()
    group = Group(come.wait)
    with pytest.raises(DeadlineExceeded):
        connect(group, timeout=0.05)
    come.set()
    assert group.aborted.wait(LIMIT)


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"built without NCCL|needs a GPU"):
        groups.open_nccl(0, 1, RingStore(SharedNotes(), "ring", LIMIT), CPU, LIMIT)


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


def test_a_confirmation_waits_for_all_members() -> None:
    first, second = witnesses()
    confirmed = threading.Event()

    def confirm() -> None:
        first.confirm()
        confirmed.set()

    thread = threading.Thread(target=confirm)
    thread.start()
    assert not confirmed.wait(0.2)
    second.confirm()
    thread.join(LIMIT)
    assert confirmed.is_set()
    for each in (first, second):
        each.abort(RingBroken("the test is over"))


def test_a_lost_member_fails_the_watch_and_confirmations() -> None:
    first, second = witnesses()
    second.abort(RingBroken("killed"))
    with pytest.raises(RingBroken, match="the watch over the ring failed"):
        first.watch.wait(LIMIT)
    with pytest.raises(RingBroken):
        first.confirm()
    first.abort(RingBroken("the test is over"))


def test_members_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "LEAVE_SECONDS", 10 * LIMIT)
    both, left = witnesses(), [threading.Event(), threading.Event()]

    def leave(rank: int) -> None:
        both[rank].leave()
        left[rank].set()

    threading.Thread(target=leave, args=(0,), daemon=True).start()
    assert not left[0].wait(0.2)
    threading.Thread(target=leave, args=(1,), daemon=True).start()
    assert all(each.wait(LIMIT) for each in left)
    for each in both:
        each.abort(RingBroken("the test is over"))


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
    monkeypatch.setattr(witness, "LEAVE_SECONDS", 0.05)
    first, second = witnesses()
    first.leave()
    first.abort(RingBroken("left"))
    with pytest.raises(RingBroken):
        second.confirm()
    second.abort(RingBroken("the test is over"))


def test_a_ring_of_one_watches_nobody() -> None:
    alone = Witness(ring_of(0, RingStore(SharedNotes(), "ring", LIMIT), size=1))
    alone.confirm()
    alone.leave()
    alone.abort(RingBroken("the test is over"))
    assert not alone.watch.done


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
