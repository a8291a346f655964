"""Notices lost members of a ring over NCCL, and confirms its operations, so that it can heal.

NCCL's operations wait without end for a lost member. When they are aborted they end as if they were complete,
and the last signals of an aborted operation can also end those of other members, with wrong sums. So each
member keeps a receive over Gloo pending, which fails when its neighbor's connection closes, and an operation
counts once all members have said over Gloo that theirs has ended.
"""

from __future__ import annotations

import torch

from hubring.ps.core.errors import HubringError
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.work import RingWork


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
            RingBroken: A member is lost, or has aborted.
        """
        self._ring.exchange(Work("a confirmation"), lambda group: group.allreduce([torch.zeros(1)]))

    def abort(self, error: HubringError) -> None:
        """Closes the connections, which all members notice."""
        self._ring.abort(error)
