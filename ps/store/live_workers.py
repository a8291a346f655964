"""The live workers, from the coordinator's last view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hubring.ps.core.types import Sender, View


class ViewChange(NamedTuple):
    """The changes of one view. A rank with a new incarnation has both left and joined."""

    left: Sequence[Sender]
    joined: Sequence[Sender]


class LiveWorkers:
    """The live workers of one store.

    Attributes:
        live: Incarnations by rank.
        epoch: Epoch of the last view.
        founders: The ranks of the first view with members.
        finished: As `View.finished`.
    """

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.epoch = View().epoch
        self.founders: tuple[int, ...] = ()
        self.finished = ""

    def senders(self) -> list[Sender]:
        """Returns all live workers."""
        return [Sender(rank, incarnation) for rank, incarnation in self.live.items()]

    def update(self, view: View) -> ViewChange | None:
        """Applies a view; ignores a view older than the last and returns None."""
        if view.epoch < self.epoch:
            return None
        before = self.live
        self.epoch, self.finished = view.epoch, view.finished
        self.live = {member.rank: member.incarnation for member in view.members}
        self.founders = self.founders or view.ranks
        left = [Sender(rank, one) for rank, one in before.items() if self.live.get(rank) != one]
        joined = [sender for sender in self.senders() if before.get(sender.rank) != sender.incarnation]
        return ViewChange(left, joined)
