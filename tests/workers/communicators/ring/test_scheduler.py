"""Members with the same lists begin the same operations in the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import DtypeAndShape
from hubring.workers.communicators.ring.scheduler import next_steps

ROWS = (DtypeAndShape("float32", (2, 3)),)


def calls(names: str) -> list[Call]:
    """One call a letter; J joins."""
    return [
        Call(Collective.JOIN, "join") if name == "J" else Call(Collective.BARRIER, name) for name in names
    ]


def order(*lines: str) -> str:
    steps = next_steps({rank: calls(line) for rank, line in enumerate(lines)})
    assert all(len({call.name for call in step.calls.values()}) == 1 for step in steps)
    return "".join(step.call.name for step in steps)


def test_operations_pending_on_all_members_start_in_the_lowest_members_order() -> None:
    assert order("abc", "cab", "bca") == "abc"


def test_operations_called_before_join_include_the_rank() -> None:
    gather = Call(Collective.ALLGATHER, "rows", layouts=ROWS)
    steps = next_steps({0: [gather, *calls("J")], 1: [gather, gather]})
    assert [(list(step.calls), step.joined) for step in steps] == [([0, 1], ()), ([1], (0,))]


@given(st.lists(st.text("abc", max_size=8), min_size=1, max_size=4))
def test_every_operation_that_all_called_for_begins_once_and_no_other(lines: list[str]) -> None:
    begun = order(*lines)
    assert {name: begun.count(name) for name in "abc"} == {
        name: min(line.count(name) for line in lines) for name in "abc"
    }
