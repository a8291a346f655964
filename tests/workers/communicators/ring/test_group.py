"""Ranks of a ring find each other through what they publish."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from hubring.ps.core.errors import JobFailed, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring import process_group
from hubring.workers.communicators.ring.group import RingStore, open_group
from tests.support.training.notes import SharedNotes
from tests.support.training.ranks import LIMIT
from tests.support.training.rings import CPU, on_threads, ring_of


def opened(rank: int, size: int, store: RingStore, timeout: float = LIMIT) -> float:
    """Opens a group, and returns the sum of its ranks."""
    group = open_group(rank, size, store, "gloo", CPU, "127.0.0.1", timeout)
    total = torch.tensor([float(rank)])
    group.allreduce([total]).wait()
    group.barrier().wait()
    return float(total)


def test_keys_that_torch_sets_are_read_by_other_ranks() -> None:
    notes = SharedNotes()
    one, other = (distributed.PrefixStore("p", RingStore(notes, "ring", 0.1)) for _ in range(2))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="Not implemented"):
        one.set("k", "")  # torch does not keep what is behind a PrefixStore
    stores = [RingStore(notes, "ring", 0.1) for _ in range(2)]
    one, other = (distributed.PrefixStore("p", store) for store in stores)  # type: ignore[attr-defined]
    stores[0].set("p/k", b"\0\xff")
    one.set("l", "text")
    one.set("m", "")
    assert not other.check(["k"])
    assert [other.get("k"), *other.multi_get(["k", "l", "m"])] == [b"\0\xff", b"\0\xff", b"text", b""]
    assert other.check(["k", "l", "m"])
    assert list(notes.values) == ["ring/p/k", "ring/p/l", "ring/p/m"]


def test_several_groups_connect_at_once_while_other_threads_compute() -> None:
    """torch calls the store from C++, without Python's lock."""
    notes, ready, busy = SharedNotes(), threading.Event(), True

    def compute() -> None:
        while busy:
            ready.set()

    interval = sys.getswitchinterval()
    spinner = threading.Thread(target=compute)
    spinner.start()
    try:
        sys.setswitchinterval(0.05)  # a thread keeps the lock ten times as long as usually
        assert ready.wait(LIMIT)
        store = RingStore(notes, "ring", LIMIT)
        sums = on_threads(12, lambda one: opened(one % 3, 3, store.within(str(one // 3))))
        assert [each.result(LIMIT) for each in sums] == [3.0] * 12
    finally:
        busy = False
        sys.setswitchinterval(interval)
        spinner.join(LIMIT)
    assert not notes.values  # a job may open any number of groups


def test_a_rank_that_does_not_come_is_named() -> None:
    store = RingStore(SharedNotes(), "ring", LIMIT)
    said = "could not connect to the other ranks within 0.5 s (--timeout): rank 2 did not publish where it"
    for rank, end in enumerate(on_threads(2, lambda rank: opened(rank, 3, store, timeout=0.5))):
        with pytest.raises(RingBroken) as raised:
            end.result(LIMIT)
        assert str(raised.value) == f"rank {rank} of 3 {said} listens"


def test_a_group_that_does_not_connect_leaves_no_thread() -> None:
    """A ring that heals opens groups as often as members are lost."""
    before = set(threading.enumerate())
    with pytest.raises(RingBroken, match="rank 1 did not publish"):
        ring_of(0, RingStore(SharedNotes(), "ring", 0.1))
    assert set(threading.enumerate()) <= before  # earlier tests' own may end meanwhile


def test_a_ring_that_is_aborted_leaves_no_listener_though_something_keeps_it() -> None:
    def listeners() -> set[Any]:
        connections = psutil.Process().net_connections("tcp")
        return {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}

    before, store = listeners(), RingStore(SharedNotes(), "ring", LIMIT)
    rings = [each.result(LIMIT) for each in on_threads(2, lambda rank: ring_of(rank, store))]
    opened_now = listeners() - before  # earlier tests' own may close meanwhile
    assert len(opened_now) == 2
    for ring in rings:
        ring.abort(RingBroken("a member is lost"))
    assert not listeners() & opened_now


def test_an_aborted_ring_keeps_its_group_while_any_exchange_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 0.1)
    store = RingStore(SharedNotes(), "ring", LIMIT)
    rings = [each.result(LIMIT) for each in on_threads(2, lambda rank: ring_of(rank, store))]
    released, begun, forgotten = list[Any](), threading.Event(), threading.Event()
    monkeypatch.setattr(rings[0], "_release", released.append)

    def exchange(wait: Callable[[], object]) -> None:
        rings[0].exchange(Work("sum"), lambda _: SimpleNamespace(wait=lambda _: wait()))

    def hang() -> None:
        begun.set()
        forgotten.wait(LIMIT)

    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(exchange, hang)
        assert begun.wait(LIMIT)
        exchange(lambda: None)
        for ring in rings:
            ring.abort(RingBroken("a member is lost"))
        forgotten.set()
        assert isinstance(stuck.exception(LIMIT), RingBroken)
    assert not released


@pytest.mark.parametrize("error", [JobFailed("rank 2 left"), RingBroken("a member of the ring is lost")])
def test_ranks_that_wait_for_each_other_end_when_the_job_fails(error: Any) -> None:
    notes = SharedNotes()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(opened, rank, 3, RingStore(notes, "ring", LIMIT)) for rank in range(2)]
        notes.await_wait(2, LIMIT)
        notes.fail(error)
        for end in ends:
            with pytest.raises(type(error), match=str(error)):
                end.result(LIMIT)


def test_a_process_may_fork_while_a_group_connects() -> None:
    """The child has no thread that answers the store, and does not need one to end."""
    notes = SharedNotes()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(opened, 0, 2, RingStore(notes, "ring", LIMIT))]
        notes.await_wait(1, LIMIT)
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ends.append(pool.submit(opened, 1, 2, RingStore(notes, "ring", LIMIT)))
        assert [end.result(LIMIT) for end in ends] == [1.0, 1.0]


def test_the_store_asks_for_each_rank_only_if_it_must() -> None:
    """A call may answer for several ranks, so a large ring needs few."""

    class Generous(SharedNotes):
        def look_around(self, key: str, timeout: float, generation: int = 0) -> dict[str, str]:
            super().look_around(key, timeout, generation)
            return dict(self.values)

    notes = Generous()
    stores = [RingStore(notes, "ring", LIMIT) for _ in range(4)]
    for rank, store in enumerate(stores):
        store.set(f"listener/{rank}", f"{rank}")
    assert [stores[0].get(f"listener/{rank}") for rank in range(4)] == [b"0", b"1", b"2", b"3"]
    assert notes.awaited == ["ring/listener/1"]
