"""Members with the same lists begin the same operations in the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import Layout
from hubring.workers.communicators.ring.collective_order import next_steps

ROWS = (Layout("float32", (2, 3)),)


def calls(names: str) -> list[Call]:
    """One call a letter; J joins."""
    return [
        Call(Collective.JOIN, "join") if name == "J" else Call(Collective.BARRIER, name) for name in names
    ]


def order(*lines: str) -> str:
    steps = next_steps({rank: calls(line) for rank, line in enumerate(lines)})
    assert all(len({call.name for call in step.calls.values()}) == 1 for step in steps)
    return "".join("J" if step.call.collective is Collective.JOIN else step.call.name for step in steps)


def test_what_all_have_pending_begins_in_the_lowest_members_order() -> None:
    assert order("abc", "cab", "bca") == "abc"


def test_what_one_has_not_called_for_waits() -> None:
    assert order("abc", "c", "bc") == "c"
    assert order("a", "b") == ""


def test_a_name_begins_as_often_as_all_have_called_it() -> None:
    assert order("aab", "aba", "a") == "a"
    assert order("aab", "abaa") == "aab"


def test_who_has_joined_is_not_waited_for() -> None:
    assert order("J", "ba", "ab") == "ba"
    assert order("ab", "aJ", "ba") == "ab"


def test_to_join_is_done_when_all_have_and_after_the_rest() -> None:
    assert order("J", "J", "aJ") == "aJ"
    assert order("J", "J", "") == ""


def test_who_has_joined_is_named() -> None:
    gather = Call(Collective.ALLGATHER, "rows", layouts=ROWS)
    (step,) = next_steps({0: calls("J"), 1: [gather], 2: [gather]})
    assert step == ({1: gather, 2: gather}, (0,))


def test_what_a_rank_called_before_it_joined_is_its_own() -> None:
    gather = Call(Collective.ALLGATHER, "rows", layouts=ROWS)
    steps = next_steps({0: [gather, *calls("J")], 1: [gather, gather]})
    assert [(list(step.calls), step.joined) for step in steps] == [([0, 1], ()), ([1], (0,))]


@given(st.lists(st.text("abc", max_size=8), min_size=1, max_size=4))
def test_every_operation_that_all_called_for_begins_once_and_no_other(lines: list[str]) -> None:
    begun = order(*lines)
    assert {name: begun.count(name) for name in "abc"} == {
        name: min(line.count(name) for line in lines) for name in "abc"
    }
