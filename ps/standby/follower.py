"""The order in which a standby applies its primary's changes.

Law: changes are applied in the order of their numbers, each once, and acknowledged once they are applied. A
change that comes again, because its acknowledgement may be lost, is only acknowledged again.
"""

from __future__ import annotations

from typing import NamedTuple

from hubring.ps.core.messages import Change, Ticket


class Turn(NamedTuple):
    """What to do next: apply a change, if there is one, and then acknowledge the ticket."""

    change: Change | None
    ticket: Ticket


class Follower:
    """Puts the changes of one stream in order.

    Args:
        stream: The stream's secret; a change with another one comes from another process.
    """

    def __init__(self, stream: bytes) -> None:
        self.stream = stream
        self._next = 0
        self._early: dict[int, Turn] = {}

    def take(self, number: int, change: Change, ticket: Ticket) -> list[Turn]:
        """Takes change number `number`; returns what can be applied and acknowledged now, in order."""
        if number < self._next:
            return [Turn(None, ticket)]
        self._early[number] = Turn(change, ticket)
        turns = []
        while self._next in self._early:
            turns.append(self._early.pop(self._next))
            self._next += 1
        return turns
