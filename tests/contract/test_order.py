"""Operations may come in any order, be under way together, and are waited for by name."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue

import pytest
import torch

from hubring.ps.core.errors import DeadlineExceeded
from hubring.ps.core.messages import ReduceOp
from hubring.workers import collectives as c
from hubring.workers.communicators.base import Communicator
from tests.support.training.rank_pool import RankPool
from tests.support.training.ranks import LIMIT


class Entered(AbstractContextManager[None]):
    """Sets an event when a caller begins to wait."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __enter__(self) -> None:
        self._event.set()

    def __exit__(self, *_: object) -> None:
        pass


def test_named_operations_may_come_in_any_order_on_every_rank(pool: RankPool) -> None:
    names = list("abcdef")

    def action(communicator: Communicator) -> dict[str, float]:
        turned = names[communicator.rank :] + names[: communicator.rank]
        works = {
            name: c.allreduce_async(
                torch.tensor(float(names.index(name))), name=name, communicator=communicator
            )
            for name in turned
        }
        return {name: works[name].get().item() for name in sorted(turned, reverse=True)}

    assert pool.run(action) == [{name: float(at) for at, name in enumerate(names)}] * pool.size


def test_calls_under_one_name_may_be_under_way_together(pool: RankPool) -> None:
    def action(communicator: Communicator) -> list[float]:
        works = [c.allreduce_async(torch.tensor(turn + 0.5), communicator=communicator) for turn in range(20)]
        return [work.get().item() for work in reversed(works)]

    assert pool.run(action) == [[turn + 0.5 for turn in reversed(range(20))]] * pool.size


def test_threads_of_a_rank_may_each_wait_for_their_own(three: RankPool) -> None:
    def action(communicator: Communicator) -> dict[str, float]:
        results: dict[str, float] = {}

        def call(name: str) -> None:
            own = torch.tensor(float(communicator.rank + ord(name)))
            results[name] = c.allreduce(own, ReduceOp.MAX, name, communicator=communicator).item()

        names = "xyz"[communicator.rank :] + "xyz"[: communicator.rank]
        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        return results

    assert three.run(action) == [{name: ord(name) + 2.0 for name in "xyz"}] * 3


def test_a_call_started_while_another_is_waited_for_ends_without_a_waiter(three: RankPool) -> None:
    started = threading.Event()

    def action(communicator: Communicator) -> bool:
        waits, ended = threading.Event(), threading.Event()

        def start() -> None:
            waits.wait(LIMIT)
            work = c.allreduce_async(torch.ones(1), name="started", communicator=communicator)
            work.when_done(lambda _: ended.set())
            started.set()

        with ExitStack() as entered:
            entered.callback(setattr, communicator, "waiting", communicator.waiting)
            communicator.waiting = Entered(waits)
            thread = threading.Thread(target=start)
            thread.start()
            if communicator.rank:  # rank 0 waits alone
                started.wait(LIMIT)
            c.allreduce(torch.ones(1), name="waited for", communicator=communicator)
        thread.join(LIMIT)
        return ended.wait(LIMIT)

    assert three.run(action) == [True] * 3


def test_no_rank_passes_a_barrier_before_all_ranks_reach_it(pool: RankPool) -> None:
    arrived: SimpleQueue[int] = SimpleQueue()

    def action(communicator: Communicator) -> int:
        arrived.put(communicator.rank)
        c.barrier_async(communicator=communicator).wait()
        return arrived.qsize()

    assert pool.run(action) == [pool.size] * pool.size


def test_a_wait_that_times_out_names_the_operation_which_goes_on(three: RankPool) -> None:
    late = threading.Event()

    def action(communicator: Communicator) -> float:
        if communicator.rank == 2:
            late.wait(LIMIT)
        work = c.allreduce_async(torch.tensor(1.5), name="late", communicator=communicator)
        if communicator.rank == 0:
            with pytest.raises(DeadlineExceeded, match=r"allreduce 'late' did not finish within 0\.01 s"):
                work.wait(0.01)
            assert not work.done
            late.set()
        return float(work.get())

    assert three.run(action) == [1.5] * 3
