"""The calls of collectives that one member of a ring that heals has made, until they have their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.work import Work
from hubring.ps.store.collective import ROOTED
from hubring.workers.communicators.base import CollectiveWork, Communicator, moved, receiver
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.healing.generations import Agreed
from hubring.workers.communicators.ring.results import CallResult
from hubring.workers.communicators.ring.transfers import ConfirmedWork, ReceivedTensor

Broke = Callable[[AllreduceCommunicator], None]
"""Called when an operation of a generation fails because a member is lost."""

LOST = -1
"""Stands for a lost member. A newcomer may have its rank in the job."""


class RootLost(RingBroken):
    """The member whose tensors a collective distributes, or that gets its result, is lost."""


@dataclass(eq=False, slots=True)
class _Pending:
    """A call without its result.

    Attributes:
        members: The members by rank, as the script knew them when it called; LOST for one that is lost.
        passed: The work of the newest generation.
        accepted: Whether that work ends the call.
    """

    call: Call
    tensors: tuple[Tensor, ...]
    work: CollectiveWork
    members: tuple[int, ...]
    passed: ConfirmedWork | None = None
    accepted: bool = False


class Calls:
    """Passes calls to the current generation, and again to the next one if that generation breaks.

    Args:
        communicator: Waits for results.
        broke: See `Broke`.
        lock: Guards the members' changes. It is held when a generation begins and ends.
    """

    def __init__(self, communicator: Communicator, broke: Broke, lock: threading.RLock) -> None:
        self._communicator, self._broke, self._lock = communicator, broke, lock
        self._pending: list[_Pending] = []
        self._ring: AllreduceCommunicator | None = None
        self._members: tuple[int, ...] = ()
        self._groups: set[tuple[int, ...]] = set()
        self._error: HubringError | None = None

    def add(
        self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork, members: tuple[int, ...]
    ) -> None:
        """Takes a call, from any thread."""
        with self._lock:
            error = self._error or self._objection(call)
            if error is None:
                pending = _Pending(call, tensors, work, members)
                self._pending.append(pending)
                self._submit(pending)
                return
        work.fail(error)

    def pause(self) -> None:
        """Keeps calls until the next generation begins."""
        self._ring = None
        self._groups.clear()

    @property
    def sends(self) -> tuple[int, ...]:
        """The numbers of the tensors that this member has begun to send, and must send again."""
        with self._lock:
            open_ = [one.passed for one in self._pending if one.passed is not None and not one.accepted]
        return tuple(passed.number for passed in open_ if passed.number)

    def settle(self, agreed: Agreed, before: tuple[int, ...]) -> None:
        """Ends calls that have received a tensor whose sender does not send it again.

        Args:
            agreed: The next generation.
            before: The members of the generation before it.
        """
        lost = {member for rank, member in enumerate(before) if rank not in agreed.stays}
        sends = {member: note.sends for member, note in zip(agreed.members, agreed.notes, strict=True)}
        done: list[tuple[_Pending, ReceivedTensor]] = []
        with self._lock:
            for pending in self._pending:
                pending.members = tuple(LOST if one in lost else one for one in pending.members)
                held = pending.passed.held if pending.passed is not None else None
                if held is not None and held.number not in sends.get(pending.members[pending.call.root], ()):
                    done.append((pending, held))
            for pending, _ in done:
                self._drop(pending)
        for pending, held in done:
            pending.work.deliver([held.tensor])

    def go_on(self, ring: AllreduceCommunicator, members: tuple[int, ...]) -> None:
        """Passes all calls to a generation of these members."""
        self._ring, self._members = ring, members
        for pending in [one for one in self._pending if not one.accepted]:
            error = self._objection(pending.call)
            if error is None:
                self._submit(pending)
            else:
                self._end(pending, error)

    def take_over(self, results: Sequence[CallResult]) -> None:
        """Ends calls with results that another member has given."""
        for result in results:
            pending = next((one for one in self._pending if one.call.name == result.name), None)
            if pending is None:
                continue
            if result.refusal:
                self._end(pending, ConfigError(result.refusal))
            elif not result.given:
                text = "a member of the ring is lost, and others already have their results"
                self._end(pending, RingBroken(f"{result.name!r}: {text}; call it again on all ranks"))
            else:
                with self._lock:
                    self._drop(pending)
                pending.work.deliver(result.tensors)

    def fail(self, error: HubringError) -> None:
        """Fails all calls, and all later ones."""
        with self._lock:
            self._error = self._error or error
            calls, self._pending = self._pending, []
        for pending in calls:
            pending.work.fail(error)

    def open_group(self, ranks: tuple[int, ...]) -> None:
        """Opens a group. Raises RingBroken while the members change."""
        with self._lock:
            ring = self._ring
            self._groups.add(ranks)
        if ring is None:
            raise RingBroken(f"a member of the ring is lost: make the group of ranks {list(ranks)} again")
        ring.open_group(ranks)

    def close_group(self, ranks: tuple[int, ...]) -> None:
        """Closes a group, if its generation has not ended."""
        with self._lock:
            ring, known = self._ring, ranks in self._groups
        if ring is not None and known:
            ring.close_group(ranks)

    def _objection(self, call: Call) -> HubringError | None:
        if call.collective is Collective.TRANSFER or not call.ranks or call.ranks in self._groups:
            return None
        return RingBroken(
            f"{call.name!r}: the ring has other members since the group of ranks {list(call.ranks)} was made;"
            " make a new group with new_group on all ranks"
        )

    def _submit(self, pending: _Pending) -> None:
        # Its caller waits at the first time only; later it may wait already, and another thread passes it.
        waits, pending.work.waits = pending.work.waits, False
        ring, call = self._ring, pending.call
        if ring is None:
            return
        if call.collective in ROOTED and pending.members != self._members:
            try:
                call = self._moved(call, pending.members)
            except RingBroken as error:
                self._end(pending, error)
                return

        def accept() -> bool:
            with self._lock:
                # A collective with a result counts in the note, even if the generation ends before its call.
                open_ = self._ring is ring or call.collective is not Collective.TRANSFER
                pending.accepted = pending.accepted or (open_ and pending in self._pending)
            return pending.accepted

        def ended(work: Work) -> None:
            if isinstance(work.error, RingBroken):
                self._broke(ring)
            elif accept():
                with self._lock:
                    if pending in self._pending:
                        self._drop(pending)
                pending.work.began = passed.began
                if work.error is None:
                    pending.work.deliver(passed.result)
                else:
                    pending.work.fail(work.error)

        pending.passed = passed = ConfirmedWork(call, self._communicator, accept)
        passed.when_done(ended)
        passed.waits = waits
        ring.take_part(call, pending.tensors, passed)
        pending.work.attend = passed.attend

    def _moved(self, call: Call, members: tuple[int, ...]) -> Call:
        """Returns a call of ranks in the current generation, from one of the ranks of these members.

        Raises:
            RingBroken: The root, or the other end of a transfer, is lost.
        """
        transfer = call.collective is Collective.TRANSFER
        ranks = [call.root, receiver(call)] if transfer else [call.root]
        for rank in ranks:
            if members[rank] not in self._members:
                if transfer:
                    raise RingBroken(f"{call.name!r}: rank {rank} is lost")
                raise RootLost(f"{call.name!r}: its root, rank {rank}, is lost")
        source, *to = [self._members.index(members[rank]) for rank in ranks]
        return moved(call, source, *to) if transfer else replace(call, root=source)

    def _drop(self, pending: _Pending) -> None:
        """Forgets a call that ends, and with it, at once, the ring that its work belongs to."""
        self._pending.remove(pending)
        pending.passed = None

    def _end(self, pending: _Pending, error: HubringError) -> None:
        with self._lock:
            self._drop(pending)
        pending.work.fail(error)
