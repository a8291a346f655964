"""What the members of a ring do next: those calls that all have pending.

Every member computes this from the same lists, so all begin the same operations
in the same order: that of the lowest member that has not joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hubring.ps.core.messages import Call, Collective
from hubring.ps.store.collective import absent

Step = dict[int, Call]
"""One operation: each member's call for it."""


def next_steps(pending: Mapping[int, Sequence[Call]]) -> list[Step]:
    """The operations that may begin now, in their order.

    Args:
        pending: Each member's calls by rank, in the order in which it made them. One of them may be to
            join: others then wait for its part no more, and until all have joined, that call is no step.
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
        steps.append({rank: next(filter(_joins, calls)) for rank, calls in pending.items()})
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
    own = {rank: queue[name][turn] for rank, queue in queues.items() if len(queue.get(name, [])) > turn}
    stands_in = absent(next(iter(own.values())))
    return {rank: own.get(rank, stands_in) for rank in queues}
