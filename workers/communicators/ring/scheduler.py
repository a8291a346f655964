"""Schedules the collectives of one group of a ring, so that all members run them in one order.

All members of a process group must start operations in the same order, but a script's collectives can start
in any order. So a thread of each member gathers the pending calls of all members and runs the calls that all
of them have. Every member computes these from the same lists, so all start the same operations in the same
order: that of the lowest rank that has not joined. This costs a round of small messages. Without it, members
that disagree would hang, crash or mix up bytes. A member without a pending call does not gather, so an idle
ring sends nothing; the other members wait in the gather for it.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import string_at
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Refusal
from hubring.ps.core.work import Work
from hubring.ps.store.collective import Part, objection, outcome, zeros
from hubring.workers.communicators.base import CollectiveWork
from hubring.workers.communicators.host.marks import tensor_over
from hubring.workers.communicators.ring.collectives import Operation, perform
from hubring.workers.communicators.ring.matching import MatchedCalls, joined, joins, next_steps
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.results import ALIKE, CallResults

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between gathers while members wait for different calls. A new call by another thread wakes
only its own member."""

CARRIED_BYTES = 1 << 15
"""The most bytes of tensors that are sent with their calls on one host, where a message has one wake-up."""

_heads = msgspec.msgpack.Decoder(list[tuple[Call, int | None]])
_LENGTH = struct.Struct("<Q")
"""Bytes of the calls."""


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call that has no result yet."""

    call: Call
    tensors: tuple[Tensor, ...]
    work: CollectiveWork


class RingScheduler:
    """The scheduler of one group on one member.

    Args:
        ring: The members' process group. `close` closes it.
        members: The members' ranks in the whole job, ascending.
        results: Keeps results for members that lack them after a loss; None: not.
        forward: Takes calls whose results differ by member, once all members have made them. Then calls
            that have no result do not fail at the end, which comes with a join too: `end` returns them.
    """

    def __init__(
        self,
        ring: Ring,
        members: Sequence[int],
        results: CallResults | None = None,
        forward: Callable[[Call, tuple[Tensor, ...], CollectiveWork], None] | None = None,
    ) -> None:
        self.ring = ring
        self.members = members
        self._rank = members[ring.rank]
        self._changed = threading.Condition()
        self._pending: list[PendingCall] = []
        self._carried: PendingCall | None = None
        self._news = False
        self._end: HubringError | None = None
        """The reason why no call is accepted any more."""
        self._results, self._forward = results, forward
        self._gatherings = 0
        self._joined: dict[int, int] = {}
        """The number of the gather that first showed each member's join."""
        self._serving = threading.Lock()
        """Held by the thread that gathers and runs collectives: the own one, or on one host a caller's."""
        self._offered: list[Offered] | None = None
        """This member's part of the gather that has begun; None: none has."""
        self._steps: deque[MatchedCalls] = deque()
        self._parts: dict[int, tuple[Tensor, ...]] = {}
        """The tensors that came with the last gather, by `id` of their call."""
        self._thread = threading.Thread(target=self._serve, name="ring scheduler", daemon=True)
        self._thread.start()

    def take_part(self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork) -> None:
        """Adds this member's call. Safe to call from any thread."""
        if self.ring.on_host is not None:
            work.attend = self._attend
        with self._changed:
            end = self._end if self._forward is None else None
            if end is None:
                self._pending.append(PendingCall(call, tensors, work))
                self._news = True
                if not work.waits or work.attend is None:
                    self._changed.notify()
        if end is not None:
            work.fail(end)

    @property
    def runs(self) -> bool:
        """Whether a collective runs, which all members have called."""
        return self._carried is not None

    @property
    def waits(self) -> bool:
        """Whether a call waits for other members."""
        return bool(self._pending) and not self.runs

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
        with self._serving:  # one that has its result ends its call first
            self._stop(error)
        self._thread.join()

    def end(self, error: HubringError) -> list[PendingCall]:
        """Ends all collectives on all members, and returns the calls that have no result; needs `forward`.

        What this member has begun may be complete on a member that has left since, so it ends first.
        """
        with self._serving:
            while (self._offered is not None or self._steps) and self._end is None:
                self._turn()
            self.ring.fail(error)
            self._stop(error)
        rest, self._pending = self._pending, []
        return rest

    def _stop(self, error: HubringError) -> None:
        with self._changed:
            self._end = self._end or error
            if self._carried is not None:
                self._pending.insert(0, self._carried)
                self._carried = None
            pending: list[PendingCall] = []
            if self._forward is None:
                pending, self._pending = self._pending, []
            self._changed.notify()
        for one in pending:
            one.work.fail(error)

    def _attend(self, work: Work, timeout: float | None) -> None:
        """Runs small collectives in the thread of a caller that waits: no other thread must be woken."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        if not self._serving.acquire(blocking=False):
            return
        try:
            while not work.done and self._end is None and self._turn(until, here=True):
                pass
        finally:
            self._serving.release()
            with self._changed:
                if self._pending or self._steps:  # for nothing, waking it takes longer than the exchange
                    self._changed.notify()

    def _serve(self) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        pause = 0.0
        while self._await_calls(pause):
            with self._serving:
                ran = self._turn()
            pause = 0.0 if ran else min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)

    def _await_calls(self, pause: float) -> bool:
        """Waits for something to do; returns False at the end. A new call ends the pause."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._news or self._end, pause)
            self._changed.wait_for(
                lambda: self._end or ((self._pending or self._steps) and not self._serving.locked())
            )
            return self._end is None

    def _turn(self, until: float = math.inf, *, here: bool = False) -> bool:
        """Gathers the members' calls, and runs those that all have made.

        Args:
            until: By `time.monotonic`. Leaves the rest to another thread if a member has not come by then.
            here: Leaves what takes long to another thread.

        Returns:
            Whether there were such calls, and no rest.
        """
        try:
            if not self._steps and not self._gather(until):
                return False
            ran = bool(self._steps)
            while self._steps:
                if here and not self._is_here(self._steps[0]):
                    return False
                self._take(self._steps.popleft())
            return ran
        except HubringError as error:
            self.ring.fail(error)
            self._stop(error)
        except Exception as error:  # the members no longer run the same operations
            broken = RingBroken(f"rank {self._rank} failed in a collective: {error!r}; restart the job")
            self.ring.fail(broken)
            self._stop(broken)
        return False

    def _gather(self, until: float) -> bool:
        """Finds the calls that all members have made; returns False if a member has not come by `until`."""
        what, on_host = "agreeing on collectives", self.ring.on_host is not None
        data: memoryview | None = None
        if self._offered is None:
            with self._changed:
                self._news = False
                pending = list(self._pending)
            if not pending:
                return True
            self._offered, data = _encode(pending, CARRIED_BYTES if on_host else 0)
        if data is not None and not on_host:
            flat = self.ring.gather(what, tensor_over(data))
            gathered: list[memoryview] | None = [one.numpy().data for one in flat]
        else:
            gathered = self.ring.gather_on_host(what, data, until)
        if gathered is not None:
            self._match(gathered)
        return gathered is not None

    def _match(self, gathered: Sequence[memoryview]) -> None:
        """Finds the calls that all members have made, from what each has sent."""
        own, self._offered = self._offered or [], None
        self._gatherings += 1
        self._parts.clear()
        pending = {}
        for rank, data in zip(self.members, gathered, strict=True):
            offered = own if rank == self._rank else _decode(data)
            pending[rank] = [call for call, _ in offered]
            self._parts |= {id(call): tensors for call, tensors in offered if tensors is not None}
            if joined(pending[rank]):
                if self._forward is not None:
                    raise RingBroken(f"rank {rank} joins")
                self._joined.setdefault(rank, self._gatherings)
        if self._results is not None:
            self._results.begin_round()
        self._steps.extend(next_steps(pending))

    def _is_here(self, step: MatchedCalls) -> bool:
        """Whether an operation needs no other one: all tensors came with the gather."""
        return (
            step.joins or self._goes_on(step) or all(id(call) in self._parts for call in step.calls.values())
        )

    def _goes_on(self, step: MatchedCalls) -> bool:
        return self._forward is not None and step.call.collective not in ALIKE

    def _take(self, step: MatchedCalls) -> None:
        """Runs one operation, with this member's call or, after its join, with zeros."""
        own = None if self._rank in step.joined else self._claim(step.calls[self._rank])
        if self._forward is not None and own is not None and self._goes_on(step):
            self._carried = None
            self._forward(own.call, own.tensors, own.work)
            return
        came = self._do(step, own)
        refusal, tensors = (came.text, ()) if isinstance(came, Refusal) else ("", came)
        if self._results is not None:
            self._results.note(step.call, refusal, tensors)
        with self._changed:
            self._carried = None
        if own is not None and not refusal:
            own.work.deliver(tensors)
        elif own is not None:
            own.work.fail(ConfigError(refusal))

    def _do(self, step: MatchedCalls, own: PendingCall | None) -> Sequence[Tensor] | Refusal:
        if not step.joins and self._is_here(step):
            parts = [Part(rank, call, self._parts[id(call)]) for rank, call in step.calls.items()]
            came = outcome(parts, step.joined)
            return came if isinstance(came, Refusal) else came[self._rank]
        refusal = objection(step.calls, step.joined)
        if refusal is None and step.joins:
            return [torch.tensor([self._last_to_join()], device="cpu")]
        return refusal or perform(self._operation(step, own))

    def _operation(self, step: MatchedCalls, own: PendingCall | None) -> Operation:
        calls = [step.calls.get(rank, step.call) for rank in self.members]
        call = calls[self.ring.rank]
        root = self.members.index(call.root) if call.root in self.members else 0
        tensors = own.tensors if own is not None else zeros(call.layouts)
        return Operation(self.ring, calls, tensors, root)

    def _claim(self, call: Call) -> PendingCall | None:
        """Returns the earliest pending call with this name; None once this member has left."""
        with self._changed:
            for one in self._pending:
                if one.call.name == call.name and joins(one.call) == joins(call):
                    self._pending.remove(one)
                    self._carried = one
                    one.work.began = time.perf_counter_ns()
                    return one
        return None

    def _last_to_join(self) -> int:
        joined, self._joined = self._joined, {}
        return max(joined, key=lambda rank: (joined[rank], rank))


Offered = tuple[Call, tuple[Tensor, ...] | None]
"""A pending call, and its tensors if they are sent with it."""


def _encode(pending: Sequence[PendingCall], most: int) -> tuple[list[Offered], memoryview]:
    """Returns pending calls as bytes, with the tensors of those that have no more than `most` bytes left."""
    offered: list[Offered] = []
    payload = bytearray()
    for one in pending:
        nbytes = sum(tensor.nbytes for tensor in one.tensors)
        carried = nbytes <= most - len(payload)
        for tensor in one.tensors if carried else ():
            payload += string_at(tensor.data_ptr(), tensor.nbytes)  # faster than views of a tensor
        offered.append((one.call, one.tensors if carried else None))
    counts = [(call, None if tensors is None else len(tensors)) for call, tensors in offered]
    head = msgspec.msgpack.encode(counts)
    return offered, memoryview(bytearray(_LENGTH.pack(len(head)) + head + payload))


def _decode(raw: memoryview) -> list[Offered]:
    start = _LENGTH.size + _LENGTH.unpack_from(raw)[0]
    offered: list[Offered] = []
    for call, count in _heads.decode(raw[_LENGTH.size : start]):
        tensors = []
        for layout in call.layouts[: count or 0]:  # a call can expect tensors of others
            piece = bytearray(raw[start : start + layout.nbytes])  # the next operation uses `raw`
            tensors.append(tensor_over(piece, getattr(torch, layout.dtype)).view(layout.shape))
            start += layout.nbytes
        offered.append((call, None if count is None else tuple(tensors)))
    return offered
