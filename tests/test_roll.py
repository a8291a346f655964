"""Calls are counted, and settled once all before them are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.roll import Roll


def test_numbers_rise_from_one() -> None:
    roll = Roll()
    assert [roll.open()[0] for _ in range(3)] == [1, 2, 3]


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=40))
def test_what_is_settled_lies_below_every_open_call_and_as_high_as_it_can(turns: list[int | None]) -> None:
    roll, open_calls = Roll(), []
    for turn in turns:
        if turn is None or not open_calls:
            number, settled = roll.open()
            open_calls.append(number)
            assert settled == min(open_calls) - 1
        else:
            roll.close(open_calls.pop(turn % len(open_calls)))
