"""Schedules the collectives of one group of a ring, so that all members run them in one order.

All members of a process group must start operations in the same order, but a script's collectives can start
in any order. So a thread of each member gathers the pending calls of all members and runs the calls that all
of them have. Every member computes these from the same lists, so all start the same operations in the same
order: that of the lowest rank that has not joined. This costs a round of small messages. Without it, members
that disagree would hang, crash or mix up bytes. A member without a pending call does not gather, so an idle
ring sends nothing; the other members wait in the gather for it.

Law of results, on a ring that heals: a generation's members run the same collectives in one order. A member
that fails in one keeps its call. What other members have completed, they give it: results that are alike on
all members. The rest is run again by the members of the next generation. A result that differs by member, as
of a scatter, cannot be given.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import DtypeAndShape
from hubring.ps.store.collective import layout_of, objection, zeros
from hubring.workers.communicators.base import CollectiveWork
from hubring.workers.communicators.ring.collectives import Operation, bundle, perform, unbundle
from hubring.workers.communicators.ring.process_group import Ring

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between gathers while members wait for different calls. A new call by another thread wakes
only its own member."""

_calls = msgspec.json.Decoder(list[Call])


ALIKE = {
    Collective.ALLREDUCE,
    Collective.ALLGATHER,
    Collective.BROADCAST,
    Collective.BARRIER,
    Collective.JOIN,
}
"""Collectives whose result is the same on all members."""


class CallResult(NamedTuple):
    """What a collective has brought.

    Attributes:
        number: Counts the collectives of a generation.
        name: The call's name.
        given: Whether the tensors are the same on all members.
        refusal: Why the calls did not fit together; empty if they did.
    """

    number: int
    name: str
    given: bool
    refusal: str
    tensors: Sequence[Tensor]


class CallResults:
    """The results of a generation that some member may lack: those since the members last met in a gather."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: list[CallResult] = []

    def begin_round(self) -> None:
        """Drops all results: every member has them, or it could not have come to the next gather."""
        self._kept.clear()

    def note(self, call: Call, refusal: str, tensors: Sequence[Tensor]) -> None:
        """Keeps the result of the next collective."""
        self.count += 1
        given = call.collective in ALIKE
        self._kept.append(
            CallResult(
                self.count, call.name, given, refusal, [one.clone() for one in tensors] if given else []
            )
        )

    def extend(self, results: Sequence[CallResult]) -> None:
        """Adds results that another member has given."""
        self._kept += results
        self.count = results[-1].number if results else self.count

    def after(self, count: int) -> Tensor:
        """Returns the results after the first `count` collectives as flat bytes."""
        kept = [result for result in self._kept if result.number > count]
        heads = [_Head(*result[:4], tuple(map(layout_of, result.tensors))) for result in kept]
        head = msgspec.json.encode(heads)
        parts = [
            torch.tensor([len(head)], device="cpu").view(torch.uint8),
            torch.frombuffer(bytearray(head), dtype=torch.uint8),
        ]
        return torch.cat([*parts, *(bundle(result.tensors) for result in kept)])


class _Head(NamedTuple):
    number: int
    name: str
    given: bool
    refusal: str
    layouts: tuple[DtypeAndShape, ...]


_heads = msgspec.json.Decoder(list[_Head])


def results_of(memory: Tensor) -> list[CallResult]:
    """Returns the results that `CallResults.after` has made bytes of."""
    memory = memory.cpu()
    length = int(memory[:8].clone().view(torch.int64).item())
    heads = _heads.decode(bytes(memory[8 : 8 + length].numpy()))
    results, start = [], 8 + length
    for number, name, given, refusal, layouts in heads:
        nbytes = sum(layout.nbytes for layout in layouts)
        piece = memory[start : start + nbytes].clone()
        results.append(CallResult(number, name, given, refusal, unbundle(piece, layouts)))
        start += nbytes
    return results


@dataclass(eq=False, slots=True)
class _Pending:
    call: Call
    tensors: tuple[Tensor, ...]
    work: CollectiveWork


class RingScheduler:
    """The scheduler of one group on one member.

    Args:
        ring: The members' process group. `close` closes it.
        members: The members' ranks in the whole job, ascending.
        results: Keeps results for members that lack them after a loss; None: not.
    """

    def __init__(self, ring: Ring, members: Sequence[int], results: CallResults | None = None) -> None:
        self.ring = ring
        self.members = members
        self._rank = members[ring.rank]
        self._changed = threading.Condition()
        self._pending: list[_Pending] = []
        self._carried: _Pending | None = None
        self._news = False
        self._end: HubringError | None = None
        """The reason why no call is accepted any more."""
        self._results = results
        self._gatherings = 0
        self._joined: dict[int, int] = {}
        """The number of the gather that first showed each member's join."""
        self._thread = threading.Thread(target=self._serve, name="ring scheduler", daemon=True)
        self._thread.start()

    def take_part(self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork) -> None:
        """Adds this member's call. Safe to call from any thread."""
        with self._changed:
            end = self._end
            if end is None:
                self._pending.append(_Pending(call, tensors, work))
                self._news = True
                self._changed.notify()
        if end is not None:
            work.fail(end)

    @property
    def runs(self) -> bool:
        """Whether a collective runs, which all members have called."""
        return self._carried is not None

    def close(self) -> None:
        """Leaves the group. Pending calls fail here and may never end on the other members."""
        left = RingBroken(f"rank {self._rank} has left the ring")
        with self._changed:
            under_way = self._carried is not None or bool(self._pending)
        if under_way:
            self.ring.fail(left)
        self._stop(left)
        if not self.ring.operations.failed:
            self._thread.join()
        self.ring.close()

    def abort(self, error: HubringError) -> None:
        """Ends all collectives on all members, and waits until none is left on this one."""
        self.ring.abort(error)  # first: without its call, this member would take part with zeros
        self._stop(error)
        self._thread.join()

    def _stop(self, error: HubringError) -> None:
        with self._changed:
            self._end = self._end or error
            pending, self._pending = self._pending, []
            if self._carried is not None:
                pending.append(self._carried)
            self._changed.notify()
        for one in pending:
            one.work.fail(error)

    def _serve(self) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        pause = 0.0
        try:
            while offered := self._await_calls(pause):
                steps = next_steps(self._gather(offered))
                if self._results is not None:
                    self._results.begin_round()
                for step in steps:
                    self._take(step)
                pause = 0.0 if steps else min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
        except HubringError as error:
            self._stop(error)
        except Exception as error:  # the members no longer run the same operations
            broken = RingBroken(f"rank {self._rank} failed in a collective: {error!r}; restart the job")
            self.ring.fail(broken)
            self._stop(broken)

    def _await_calls(self, pause: float) -> list[Call]:
        """Waits for a call and returns all pending calls; an empty list means the end.

        A new call ends the pause.
        """
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._news or self._end, pause)
            self._changed.wait_for(lambda: self._pending or self._end)
            self._news = False
            return [one.call for one in self._pending]

    def _gather(self, calls: list[Call]) -> dict[int, list[Call]]:
        """Returns every member's pending calls, by rank."""
        self._gatherings += 1
        own = torch.frombuffer(bytearray(msgspec.json.encode(calls)), dtype=torch.uint8)
        gathered = self.ring.gather("agreeing on collectives", own)
        pending = {
            rank: _calls.decode(bytes(one.numpy())) for rank, one in zip(self.members, gathered, strict=True)
        }
        for rank, line in pending.items():
            if _joined(line):
                self._joined.setdefault(rank, self._gatherings)
        return pending

    def _take(self, step: MatchedCalls) -> None:
        """Runs one operation, with this member's call or, after its join, with zeros."""
        own = None if self._rank in step.joined else self._claim(step.calls[self._rank])
        refusal = objection(step.calls, step.joined)
        came = self._do(step, own) if refusal is None else []
        if self._results is not None:
            self._results.note(step.call, "" if refusal is None else refusal.text, came)
        with self._changed:
            self._carried = None
        if own is not None and refusal is None:
            own.work.deliver(came)
        elif own is not None and refusal is not None:
            own.work.fail(ConfigError(refusal.text))

    def _do(self, step: MatchedCalls, own: _Pending | None) -> Sequence[Tensor]:
        if step.call.collective is Collective.JOIN:
            return [torch.tensor([self._last_to_join()], device="cpu")]
        return perform(self._operation(step, own))

    def _operation(self, step: MatchedCalls, own: _Pending | None) -> Operation:
        calls = [step.calls.get(rank, step.call) for rank in self.members]
        call = calls[self.ring.rank]
        root = self.members.index(call.root) if call.root in self.members else 0
        tensors = own.tensors if own is not None else zeros(call.layouts)
        return Operation(self.ring, calls, tensors, root)

    def _claim(self, call: Call) -> _Pending | None:
        """Returns the earliest pending call with this name; None once this member has left."""
        with self._changed:
            for one in self._pending:
                if one.call.name == call.name and _joins(one.call) == _joins(call):
                    self._pending.remove(one)
                    self._carried = one
                    one.work.began = time.perf_counter_ns()
                    return one
        return None

    def _last_to_join(self) -> int:
        joined, self._joined = self._joined, {}
        return max(joined, key=lambda rank: (joined[rank], rank))


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


def next_steps(pending: Mapping[int, Sequence[Call]]) -> list[MatchedCalls]:
    """Returns the operations that can start now, in order.

    Args:
        pending: Each member's calls by rank, in the order in which it made them. After a member's join
            call, the other members do not wait for it. The joins themselves become one operation once
            all members have joined.
    """
    waited_for = [rank for rank, calls in pending.items() if not _joined(calls)]
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
        steps.append(MatchedCalls({rank: next(filter(_joins, calls)) for rank, calls in pending.items()}))
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


def _step(queues: Mapping[int, Mapping[str, Sequence[Call]]], name: str, turn: int) -> MatchedCalls:
    calls = {rank: queue[name][turn] for rank, queue in queues.items() if len(queue.get(name, [])) > turn}
    return MatchedCalls(calls, tuple(rank for rank in queues if rank not in calls))
