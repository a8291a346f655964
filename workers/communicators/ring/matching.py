"""Which collectives can start: those that all members have called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hubring.ps.core.messages import Call, Collective


class MatchedCalls(NamedTuple):
    """One operation."""

    calls: dict[int, Call]
    """The calls of the members that called it, by rank."""
    joined: tuple[int, ...] = ()
    """The other members, which have joined."""

    @property
    def call(self) -> Call:
        """The call of the lowest rank that called it."""
        return next(iter(self.calls.values()))

    @property
    def joins(self) -> bool:
        return joins(self.call)


def next_steps(pending: Mapping[int, Sequence[Call]]) -> list[MatchedCalls]:
    """Returns the operations that can start now, in order.

    Args:
        pending: Each member's calls by rank, in the order in which it made them. After a member's join
            call, the other members do not wait for it. The joins themselves become one operation once
            all members have joined.
    """
    firsts = {rank: calls[0] for rank, calls in pending.items() if len(calls) == 1 and not joins(calls[0])}
    if len(firsts) == len(pending) and len({one.name for one in firsts.values()}) == 1:
        return [MatchedCalls(firsts)]  # a lone call, in a third of the time
    waited_for = [rank for rank, calls in pending.items() if not joined(calls)]
    queues = {rank: _by_name(calls) for rank, calls in pending.items()}
    steps: list[MatchedCalls] = []
    begun: defaultdict[str, int] = defaultdict(int)
    for leader in waited_for[:1] or pending:
        for name, calls in queues[leader].items():
            shortest = min((len(queues[rank].get(name, [])) for rank in waited_for), default=len(calls))
            for turn in range(begun[name], shortest):
                steps.append(_step(queues, name, turn))
            begun[name] = max(begun[name], shortest)
    if not waited_for:
        steps.append(MatchedCalls({rank: next(filter(joins, calls)) for rank, calls in pending.items()}))
    return steps


def joins(call: Call) -> bool:
    """Whether the rank has joined."""
    return call.collective is Collective.JOIN


def joined(calls: Sequence[Call]) -> bool:
    """Whether a rank with these pending calls has joined."""
    return any(map(joins, calls))


def _by_name(calls: Sequence[Call]) -> dict[str, list[Call]]:
    queues: dict[str, list[Call]] = {}
    for call in calls:
        if not joins(call):
            queues.setdefault(call.name, []).append(call)
    return queues


def _step(queues: Mapping[int, Mapping[str, Sequence[Call]]], name: str, turn: int) -> MatchedCalls:
    calls = {rank: queue[name][turn] for rank, queue in queues.items() if len(queue.get(name, [])) > turn}
    return MatchedCalls(calls, tuple(rank for rank in queues if rank not in calls))
