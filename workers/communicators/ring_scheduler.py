"""The members of one group of a ring, and how they agree on what they do next.

Operations on a process group must begin in one order on all members, and a
script's need not. So each member's thread gathers from all what they have
pending, and does what all of them have (`hubring.workers.communicators.collective_order`). That costs a round
of small messages; it spares what process groups do with members that
disagree: hang, crash, or mix up bytes. Who has nothing pending takes no part
in a gathering, so that an idle ring costs nothing, and the others wait in it.
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
from hubring.workers.communicators.collective_order import Step, next_steps
from hubring.workers.communicators.ring_collectives import Doing, perform
from hubring.workers.communicators.ring_process_group import Ring

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between gatherings while all members wait, each for something else: some other thread of
one of them must call what another waits for, and wakes only its own member."""

_calls = msgspec.json.Decoder(list[Call])


@dataclass(eq=False, slots=True)
class _Pending:
    call: Call
    tensors: tuple[Tensor, ...]
    work: CollectiveWork


class RingScheduler:
    """One group, from one member's side.

    Args:
        ring: The members' process group; closed with the scheduler.
        members: Their ranks in the whole job, rising.
    """

    def __init__(self, ring: Ring, members: Sequence[int]) -> None:
        self.ring = ring
        self.members = members
        self._rank = members[ring.rank]
        self._changed = threading.Condition()
        self._pending: list[_Pending] = []
        self._carried: _Pending | None = None
        self._news = False
        self._end: HubringError | None = None
        """Why nothing is taken in any more."""
        self._gatherings = 0
        self._joined: dict[int, int] = {}
        """In which gathering each member was first seen to have joined."""
        self._thread = threading.Thread(target=self._serve, name="ring scheduler", daemon=True)
        self._thread.start()

    def take_part(self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork) -> None:
        """Takes in this member's call, from any thread."""
        with self._changed:
            end = self._end
            if end is None:
                self._pending.append(_Pending(call, tensors, work))
                self._news = True
                self._changed.notify()
        if end is not None:
            work.fail(end)

    def close(self) -> None:
        """Leaves; what is still under way fails, and may then never end on the others."""
        left = RingBroken(f"rank {self._rank} has left the ring")
        with self._changed:
            under_way = self._carried is not None or bool(self._pending)
        if under_way:
            self.ring.fail(left)
        self._stop(left)
        if not self.ring.operations.failed:
            self._thread.join()
        self.ring.close()

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
        torch.get_num_threads()  # a thread that never asked has MKL take every core (torch 2.13)
        pause = 0.0
        try:
            while offered := self._await_calls(pause):
                steps = next_steps(self._gather(offered))
                for step in steps:
                    self._take(step)
                pause = 0.0 if steps else min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
        except HubringError as error:
            self._stop(error)
        except Exception as error:  # the others are in step no more
            broken = RingBroken(f"rank {self._rank} failed in a collective: {error!r}; start the job again")
            self.ring.fail(broken)
            self._stop(broken)

    def _await_calls(self, pause: float) -> list[Call]:
        """What is pending, once something is; a new call ends the pause. Nothing at the end."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._news or self._end, pause)
            self._changed.wait_for(lambda: self._pending or self._end)
            self._news = False
            return [one.call for one in self._pending]

    def _gather(self, calls: list[Call]) -> dict[int, list[Call]]:
        """What every member has pending, by rank."""
        self._gatherings += 1
        told = torch.frombuffer(bytearray(msgspec.json.encode(calls)), dtype=torch.uint8)
        gathered = self.ring.gather("agreeing on collectives", told)
        pending = {
            rank: _calls.decode(bytes(one.numpy())) for rank, one in zip(self.members, gathered, strict=True)
        }
        for rank, line in pending.items():
            if any(call.collective is Collective.JOIN for call in line):
                self._joined.setdefault(rank, self._gatherings)
        return pending

    def _take(self, step: Step) -> None:
        """Does one operation, for a call of this member's or in its absence."""
        own = self._claim(step[self._rank])
        refusal = objection(step)
        came = self._do(step, own) if refusal is None else []
        with self._changed:
            self._carried = None
        if own is not None and refusal is None:
            own.work.deliver(came)
        elif own is not None and refusal is not None:
            own.work.fail(ConfigError(refusal.text))

    def _do(self, step: Step, own: _Pending | None) -> Sequence[Tensor]:
        if step[self._rank].collective is Collective.JOIN:
            return [torch.tensor([self._last_to_join()])]
        return perform(self._doing(step, own))

    def _doing(self, step: Step, own: _Pending | None) -> Doing:
        call = step[self._rank]
        root = self.members.index(call.root) if call.root in self.members else 0
        tensors = own.tensors if own is not None else zeros(call.layouts)
        return Doing(self.ring, list(step.values()), tensors, root)

    def _claim(self, call: Call) -> _Pending | None:
        """The earliest pending one of this name; None where this member has joined and called for nothing."""
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
