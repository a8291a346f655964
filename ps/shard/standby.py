"""A standby: how a primary connects with it, and what it does with what its primary forwards.

Law: until it is promoted it serves only its primary. From then on it refuses its primary, which must exit. A
shard with another stream is not its primary, and asks the coordinator what becomes of that stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from hubring.ps.core.errors import ConnectionLost, HubringError
from hubring.ps.core.messages import (
    Change,
    ClosedRound,
    Code,
    CollectiveResult,
    Contribute,
    CoordinatorCall,
    Delivery,
    Forwarded,
    Probe,
    Refusal,
    Request,
    Ticket,
    Transfer,
)
from hubring.ps.security.certificate import Identity
from hubring.ps.shard.coordinator_calls import action
from hubring.ps.shard.loop import OTHER_STREAM, ShardLoop
from hubring.ps.shard.stream import OrderedChanges, StandbyVerdict, Stream, pass_failure, restore_stream
from hubring.ps.transport.base import Connection, Transport
from hubring.ps.transport.registry import FASTEST_FIRST, ShardAddress, dial_by, reach, transport

log = logging.getLogger(__name__)


_NOT_SERVING = Refusal(Code.BAD_REQUEST, "this shard is a standby and serves no workers yet")


class Follower:
    """A standby's part of a shard's loop, for `ShardLoop.follow`. For the loop's thread only.

    Args:
        loop: The shard's.
        stream: The secret of its primary's stream; None before it has a primary.
        index: The primary's number.
    """

    def __init__(self, loop: ShardLoop, stream: bytes | None, index: int) -> None:
        self._loop = loop
        self._stream = stream
        self._changes = OrderedChanges()
        self._index = index

    def answer(self, number: int, request: Request | Probe | Forwarded, ticket: Ticket) -> list[Delivery]:
        """Applies a change of the primary, in its turn; returns the acknowledgements."""
        if not isinstance(request, Forwarded):
            return [Delivery(ticket, _NOT_SERVING)]
        if self._stream is None or self._stream != request.stream:
            return [Delivery(ticket, OTHER_STREAM)]
        acknowledged = []
        for change, taken in self._changes.take(number, request.change, ticket):
            if change is not None:
                self._apply(change)
            acknowledged.append(Delivery(taken, CollectiveResult()))
        return acknowledged

    def _apply(self, change: Change) -> None:
        if isinstance(change, CoordinatorCall):  # it succeeded on the primary: an error ends this process
            self._loop.obey(change, action(change, self._index))
            return
        try:
            match change:
                case ClosedRound() | Transfer():
                    self._loop.store.apply(change)
                case Contribute():
                    # The primary reuses its memory once this change is acknowledged.
                    own = replace(change, tensors=tuple(tensor.clone() for tensor in change.tensors))
                    self._loop.store.handle(own, None)
                case _:
                    self._loop.store.handle(change, None)
        except HubringError as error:  # the primary raised it too, and reports it
            log.debug("a change of the primary failed: %s", error)


DIAL_SECONDS = 2.0


class StandbyLink:
    """Opens a primary's streams. Safe from any thread.

    Args:
        ask: Asks the coordinator about the stream with a secret; the second argument is whether the standby
            cannot be reached.
        replaced: Called with the reason when a standby has taken this shard's place.
        identity: The certificate that this shard shows to a standby; None for none.
    """

    def __init__(
        self,
        ask: Callable[[bytes, bool], StandbyVerdict],
        replaced: Callable[[str], None],
        identity: Identity | None = None,
    ) -> None:
        self.identity = identity
        self._ask = ask
        self._replaced = replaced
        self._kinds: dict[str, Transport] = {name: transport(name) for name in FASTEST_FIRST}

    def begin(
        self, loop: ShardLoop, standby: ShardAddress, secret: bytes, wanted: Callable[[], bool]
    ) -> Future[None]:
        """Forwards a loop's state and all changes to a standby.

        Args:
            loop: The loop.
            standby: Where the standby is.
            secret: The stream's secret.
            wanted: Whether to begin; called in the loop's thread.

        Returns:
            A result once the standby has the state, or is given up.

        Raises:
            ServerUnreachable: The standby cannot be reached.
        """
        kind, connection = reach("the standby", standby, self._kinds, DIAL_SECONDS)

        def dial() -> Connection:
            return dial_by(kind, standby, DIAL_SECONDS)

        def restore(lost: ConnectionLost) -> None:
            restore_stream(
                lost,
                dial,
                partial(self._ask, secret),
                lambda again: loop.command(lambda: loop.rejoin(secret, again)),
                lambda: loop.command(lambda: loop.leave_standby(secret)),
            )

        def begin() -> None:
            if not wanted():
                connection.close()
                received.set_result(None)
                return
            stream = Stream(secret, kind.allocate, restore, self._replaced)
            loop.replicate(stream, connection, received)

        received: Future[None] = Future()
        loop.command(begin).add_done_callback(lambda done: pass_failure(done, received))
        return received
