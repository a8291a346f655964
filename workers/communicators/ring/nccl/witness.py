"""Notices lost members of a ring over NCCL, and confirms its operations, so that it can heal.

NCCL's operations wait without end for a lost member. When they are aborted they end as if they were complete,
and the last signals of an aborted operation can also end those of other members, with wrong sums. So each
member keeps a receive over Gloo pending, which fails when its neighbor's connection closes, and an operation
counts once all members have said over Gloo that theirs has ended.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.work import RingWork

LEAVE_SECONDS = 2.0
"""How long a member that leaves waits for the others."""


class Witness:
    """One member's side.

    Args:
        ring: A ring over Gloo for this only, which can be aborted.

    Attributes:
        watch: Fails when a member is lost or leaves. Otherwise it does not end.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.watch = RingWork("the watch over the ring")
        before = (ring.rank - 1) % ring.size
        if before != ring.rank:
            ring.start(self.watch, lambda group: group.recv([torch.zeros(1)], before, 0))

    def confirm(self) -> None:
        """Waits until all members have called it as often.

        Raises:
            RingBroken: A member is lost, leaves, or has aborted.
        """
        if self._count_leavers(leaves=False):
            raise RingBroken("a member of the ring leaves before this operation has ended")

    def leave(self) -> None:
        """Waits until all members leave, at most `LEAVE_SECONDS`; call it before `abort`.

        A member that has ended its last operation may otherwise fail the confirmation of one that has not.
        """

        def until_all_leave() -> None:
            with suppress(HubringError):
                self._count_leavers(leaves=True)

        thread = threading.Thread(target=until_all_leave, name="leaving the ring", daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)

    def _count_leavers(self, *, leaves: bool) -> int:
        """Returns how many members leave, once all have called this."""
        leavers = torch.tensor([float(leaves)])
        self._ring.exchange(Work("a confirmation"), lambda group: group.allreduce([leavers]))
        return int(leavers.item())

    def abort(self, error: HubringError) -> None:
        """Closes the connections, which all members notice."""
        self._ring.abort(error)
