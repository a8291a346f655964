"""Schedules the collectives of one group of a ring, so that all members run them in one order.

All members of a process group must start operations in the same order, but a script's
collectives can start in any order. So a thread of each member gathers the pending calls of all
members and runs the calls that all of them have (`hubring.workers.communicators.ring.collective_order`).
This costs a round of small messages. Without it, members that disagree would hang, crash or mix up
bytes. A member without a pending call does not gather, so an idle ring sends nothing; the other
members wait in the gather for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.store.collective import objection, zeros
from hubring.workers.communicators.base import CollectiveWork
from hubring.workers.communicators.ring.call_log import Results
from hubring.workers.communicators.ring.collective_order import Step, next_steps
from hubring.workers.communicators.ring.collectives import Operation, perform
from hubring.workers.communicators.ring.process_group import Ring

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between gathers while members wait for different calls. A new call by another thread wakes
only its own member."""

_calls = msgspec.json.Decoder(list[Call])


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

    def __init__(self, ring: Ring, members: Sequence[int], results: Results | None = None) -> None:
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
            if any(call.collective is Collective.JOIN for call in line):
                self._joined.setdefault(rank, self._gatherings)
        return pending

    def _take(self, step: Step) -> None:
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

    def _do(self, step: Step, own: _Pending | None) -> Sequence[Tensor]:
        if step.call.collective is Collective.JOIN:
            return [torch.tensor([self._last_to_join()])]
        return perform(self._operation(step, own))

    def _operation(self, step: Step, own: _Pending | None) -> Operation:
        calls = [step.calls.get(rank, step.call) for rank in self.members]
        call = calls[self.ring.rank]
        root = self.members.index(call.root) if call.root in self.members else 0
        tensors = own.tensors if own is not None else zeros(call.layouts)
        return Operation(self.ring, calls, tensors, root)

    def _claim(self, call: Call) -> _Pending | None:
        """Returns the earliest pending call with this name; None once this member has left."""
        with self._changed:
            for one in self._pending:
                if one.call.name == call.name and (one.call.collective is Collective.JOIN) == (
                    call.collective is Collective.JOIN
                ):
                    self._pending.remove(one)
                    self._carried = one
                    return one
        return None

    def _last_to_join(self) -> int:
        joined, self._joined = self._joined, {}
        return max(joined, key=lambda rank: (joined[rank], rank))
