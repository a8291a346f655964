"""What a standby does: it applies what its primary forwards.

Law: until it is promoted it serves only its primary. From then on it refuses its primary, which must exit. A
shard with another stream is not its primary, and asks the coordinator what becomes of that stream.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from hubring.ps.core.errors import SHARD_REPLACED, HubringError
from hubring.ps.core.messages import (
    Change,
    Code,
    Contribute,
    CoordinatorCall,
    Delivery,
    Forwarded,
    Probe,
    Refusal,
    Request,
    Result,
    Round,
    Ticket,
    Transfer,
)
from hubring.ps.shard.coordinator_calls import action
from hubring.ps.standby.follower import Follower

if TYPE_CHECKING:
    from hubring.ps.shard.loop import ShardLoop

log = logging.getLogger(__name__)


class Following:
    """A standby's part of a shard's loop. For the loop's thread only.

    Args:
        stream: The secret of its primary's stream; None before it has a primary.
        index: The primary's number.
    """

    def __init__(self, stream: bytes | None, index: int) -> None:
        self.stream = stream
        self._follower = None if stream is None else Follower(stream)
        self._index = index

    def take(self, loop: ShardLoop, number: int, forwarded: Forwarded, ticket: Ticket) -> list[Delivery]:
        """Applies a change of the primary, in its turn; returns the acknowledgements."""
        if self._follower is None or self._follower.stream != forwarded.stream:
            return [Delivery(ticket, _OTHER_STREAM)]
        acknowledged = []
        for change, taken in self._follower.take(number, forwarded.change, ticket):
            if change is not None:
                self._apply(loop, change)
            acknowledged.append(Delivery(taken, Result()))
        return acknowledged

    def _apply(self, loop: ShardLoop, change: Change) -> None:
        if isinstance(change, CoordinatorCall):  # it succeeded on the primary: an error ends this process
            loop.obey(change, action(change, self._index))
            return
        try:
            match change:
                case Round() | Transfer():
                    loop.store.apply(change)
                case Contribute():
                    # The primary reuses its memory once this change is acknowledged.
                    own = replace(change, tensors=tuple(tensor.clone() for tensor in change.tensors))
                    loop.store.handle(own, None)
                case _:
                    loop.store.handle(change, None)
        except HubringError as error:  # the primary raised it too, and reports it
            log.debug("a change of the primary failed: %s", error)


def answer(
    loop: ShardLoop, number: int, request: Request | Probe | Forwarded, ticket: Ticket
) -> list[Delivery]:
    """Answers what a primary forwards, and what others send to a standby."""
    if not isinstance(request, Forwarded):
        return [Delivery(ticket, _NOT_SERVING)]
    if loop.following is None:
        replaced = request.stream == loop.succeeded
        return [Delivery(ticket, _SUPERSEDED if replaced else _OTHER_STREAM)]
    return loop.following.take(loop, number, request, ticket)


def promote(loop: ShardLoop) -> None:
    """Takes the primary's place; in the loop's thread. A second call changes nothing."""
    if loop.following is not None:
        loop.succeeded, loop.following = loop.following.stream, None


_SUPERSEDED = Refusal(Code.FENCED, SHARD_REPLACED)
_OTHER_STREAM = Refusal(Code.OTHER_STREAM, "this process is not the standby of this stream")
_NOT_SERVING = Refusal(Code.BAD_REQUEST, "this shard is a standby and serves no workers yet")
