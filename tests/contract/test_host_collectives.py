"""Workers of a hub that are on one host exchange without it, until one is lost; the hub's promises hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from hubring.ps.core.errors import RingBroken
from hubring.ps.core.types import Sender
from hubring.workers.collectives import allreduce, alltoall, join
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.host.shared_memory import HostExchange
from tests.support.training.ranks import LIMIT, HubRanks, Seat


@pytest.fixture
def hub() -> Iterator[HubRanks]:
    made = HubRanks()
    yield made
    made.close()


def rounds(hub: HubRanks) -> int:
    """How many collectives the hub has run."""
    return sum(loop.command(loop.store.stats).result(LIMIT).collectives for loop in hub.loops)


def total(communicator: Communicator, value: float = 1.0) -> float:
    return float(allreduce(torch.tensor([value]), name="total", communicator=communicator) * 3)


def test_the_hub_takes_no_part_until_a_worker_joins(hub: HubRanks) -> None:
    counted: list[int] = []
    at_once = threading.Barrier(3, lambda: counted.append(rounds(hub)), timeout=LIMIT)

    def action(communicator: Communicator) -> list[float]:
        sums = [total(communicator)]
        at_once.wait()
        sums += [total(communicator, float(communicator.rank)) for _ in range(10)]
        sums.append(allreduce(torch.ones(1 << 20), communicator=communicator)[-1].item())
        at_once.wait()
        rows, _ = alltoall(torch.full((3,), float(communicator.rank)), communicator=communicator)
        if communicator.rank > 0:
            sums.append(total(communicator))
        assert join(communicator=communicator) >= 0
        return [*sums, *rows.tolist()]

    first, *others = hub.run(action)
    assert first == [3.0, *[3.0] * 10, 1.0, 0.0, 1.0, 2.0]
    assert others == [[3.0, *[3.0] * 10, 1.0, 2.0, 0.0, 1.0, 2.0]] * 2
    assert counted[0] == counted[1]
    assert rounds(hub) > counted[1]


@pytest.mark.parametrize("fault", ["_dial", "_listen"])
def test_workers_apart_exchange_through_the_hub(
    hub: HubRanks, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """So do all of them if one cannot get memory to share."""
    working, calls = getattr(meeting, fault), count()

    def fails_once(*given: Any) -> object:
        if next(calls) == 1:
            raise OSError
        return working(*given)

    monkeypatch.setattr(meeting, fault, fails_once)
    assert hub.run(total) == [3.0] * 3
    assert rounds(hub) > 2


@pytest.mark.parametrize("complete", [False, True], ids=["no worker", "one worker"])
def test_a_call_that_loses_a_worker_has_one_result_on_all_others(
    hub: HubRanks, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """The result has the lost worker's part only if another worker has that result already."""
    end, armed, has_result = HostExchange.end_gather, threading.Event(), threading.Event()
    begun = threading.Barrier(3, armed.set, LIMIT)

    def ends(exchange: HostExchange, *until: float) -> object:
        if armed.is_set() and (exchange._own == 2 or not complete):
            assert not complete or has_result.wait(LIMIT)
            exchange.fail("the connections are cut")
            raise RingBroken("the connections are cut")
        return end(exchange, *until)

    def action(communicator: Communicator) -> object:
        assert total(communicator) == 3.0
        begun.wait()
        if communicator.rank == 1:
            if complete:
                total(communicator, 7.0)
            hub.see(0, 2)
            return None
        first = total(communicator)
        if communicator.rank == 0:
            has_result.set()
        return first, total(communicator)

    monkeypatch.setattr(HostExchange, "end_gather", ends)
    first, _, last = hub.run(action)
    assert first == last == ((9.0, 3.0) if complete else (3.0, 3.0))


@pytest.mark.parametrize("late", [False, True], ids=["before the first step", "late"])
def test_a_worker_in_a_lost_ones_place_goes_on_with_the_others(hub: HubRanks, late: bool) -> None:
    """Before the first step it repeats all calls, and gets what the lost one got."""
    ended, replaced = threading.Barrier(3, timeout=LIMIT), threading.Event()

    def action(communicator: Communicator) -> list[float]:
        sums = [total(communicator, float(communicator.rank + turn)) for turn in range(3)]
        if communicator.rank != 1 or not replaced.is_set():
            ended.wait()
        if communicator.rank == 1 and not replaced.is_set():
            communicator.close(finished=False)
            hub.see(0, 1, 2, r1=9)
            replaced.set()
            seat = Seat(hub, 1, late)
            seat.sender = Sender(1, 9)
            newcomer = hub.seated(seat)
            sums = [*sums, total(newcomer)] if late else action(newcomer)
            newcomer.close(finished=True)
            return sums
        return [*sums, total(communicator)]

    assert hub.run(action) == [[3.0, 6.0, 9.0, 3.0]] * 3
