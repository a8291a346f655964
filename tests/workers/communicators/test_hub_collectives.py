"""Calls are counted, and settled once all before them are; what is closed beyond that is told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hubring.workers.communicators.hub_collectives import MOST_CLOSED, CallIds


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=40))
def test_the_settled_call_is_the_highest_one_below_every_open_call(turns: list[int | None]) -> None:
    ids, open_calls, told = CallIds(), list[int](), list[int]()
    for turn in turns:
        if turn is None or not open_calls:
            number, settled, beyond = ids.open()
            open_calls.append(number)
            assert settled == min(open_calls) - 1
            told += beyond
            assert set(range(1, number + 1)) - set(told) - set(open_calls) <= set(range(1, settled + 1))
        else:
            ids.close(open_calls.pop(turn % len(open_calls)))
    assert len(set(told)) == len(told)
    assert not {*told} & {*open_calls}


def test_many_that_are_closed_are_told_some_at_a_time() -> None:
    ids = CallIds()
    numbers = [ids.open()[0] for _ in range(2 * MOST_CLOSED + 1)]
    for number in numbers[1:]:
        ids.close(number)
    told = [ids.open()[2] for _ in range(3)]
    assert [len(some) for some in told] == [MOST_CLOSED, MOST_CLOSED, 0]
    assert [number for some in told for number in some] == numbers[1:]
