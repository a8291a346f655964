"""Connects a primary with its standby."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from hubring.ps.core.errors import ConnectionLost
from hubring.ps.security.certificate import Identity
from hubring.ps.shard.loop import ShardLoop, pass_failure
from hubring.ps.standby import reconnection
from hubring.ps.standby.reconnection import Verdict
from hubring.ps.standby.stream import Stream
from hubring.ps.transport.base import Connection, Transport
from hubring.ps.transport.registry import FASTEST_FIRST, ShardAddress, dial_by, reach, transport

DIAL_SECONDS = 2.0


class Replication:
    """Opens a primary's streams. Safe from any thread.

    Args:
        ask: Asks the coordinator about the stream with a secret; the second argument is whether the standby
            cannot be reached.
        replaced: Called with the reason when a standby has taken this shard's place.
        identity: The certificate that this shard shows to a standby; None for none.
    """

    def __init__(
        self,
        ask: Callable[[bytes, bool], Verdict],
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
            reconnection.restore(
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
