"""Chooses a ring's next operations: the calls that all members have pending.

Every member computes this from the same lists, so all start the same operations in the
same order: the order of the lowest rank that has not joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hubring.ps.core.messages import Call, Collective


class Step(NamedTuple):
    """One operation."""

    calls: dict[int, Call]
    """The calls of the members that called it, by rank."""
    joined: tuple[int, ...] = ()
    """The other members, which have joined."""

    @property
    def call(self) -> Call:
        """The call of the lowest rank that called it."""
        return next(iter(self.calls.values()))


def next_steps(pending: Mapping[int, Sequence[Call]]) -> list[Step]:
    """Returns the operations that can start now, in order.

    Args:
        pending: Each member's calls by rank, in the order in which it made them. After a member's join
            call, the other members do not wait for it. The joins themselves become one operation once
            all members have joined.
    """
    waited_for = [rank for rank, calls in pending.items() if not _joined(calls)]
    queues = {rank: _by_name(calls) for rank, calls in pending.items()}
    steps: list[Step] = []
    begun: defaultdict[str, int] = defaultdict(int)
    for leader in waited_for[:1] or pending:
        for name, calls in queues[leader].items():
            shortest = min((len(queues[rank].get(name, [])) for rank in waited_for), default=len(calls))
            for turn in range(begun[name], shortest):
                steps.append(_step(queues, name, turn))
            begun[name] = max(begun[name], shortest)
    if not waited_for:
        steps.append(Step({rank: next(filter(_joins, calls)) for rank, calls in pending.items()}))
    return steps


def _joins(call: Call) -> bool:
    return call.collective is Collective.JOIN


def _joined(calls: Sequence[Call]) -> bool:
    return any(map(_joins, calls))


def _by_name(calls: Sequence[Call]) -> dict[str, list[Call]]:
    queues: dict[str, list[Call]] = {}
    for call in calls:
        if not _joins(call):
            queues.setdefault(call.name, []).append(call)
    return queues


def _step(queues: Mapping[int, Mapping[str, Sequence[Call]]], name: str, turn: int) -> Step:
    calls = {rank: queue[name][turn] for rank, queue in queues.items() if len(queue.get(name, [])) > turn}
    return Step(calls, tuple(rank for rank in queues if rank not in calls))
