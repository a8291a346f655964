"""What a server's silence means to a worker.

Law: a server that ended refuses calls, and is given some seconds, in which a standby may take over. A server
that is stopped lets calls time out, and is given at least the lease, because it recovers. Pauses of this
process do not count.
"""

from __future__ import annotations

import grpc

from hubring.ps.core.errors import RESTART_ALL, Fenced, HubringError, ServerUnreachable
from hubring.ps.core.pauses import Pauses
from hubring.ps.core.timing import SystemTime, TimeSource
from hubring.ps.transport.grpc.call_error import describe, patience


class Silence:
    """The time since a server's last reply.

    Args:
        address: The server's address, for messages.
        lease_seconds: The worker's lease.
        silent_seconds: How long the server may refuse connections.
        clock: The source of the time.

    Attributes:
        pauses: Encloses the waits of the thread that calls the server.
    """

    def __init__(
        self, address: str, lease_seconds: float, silent_seconds: float, clock: TimeSource | None = None
    ) -> None:
        self._clock = clock or SystemTime()
        self.pauses = Pauses(self._clock)
        self._address = address
        self._lease = lease_seconds
        self._refusing = silent_seconds
        self._heard = self._clock.now()

    @property
    def timeout(self) -> float:
        """How long one call may take, in seconds."""
        return max(self._lease, self._refusing)

    def end(self) -> None:
        """Notes a reply."""
        self._heard = self._clock.now()
        self.pauses.clear()

    def meaning(self, error: grpc.RpcError) -> HubringError | None:
        """Returns why this worker cannot continue after a call that failed; None if it can call again."""
        patient = self._silent() <= patience(error, self._lease, self._refusing)
        return None if patient else self.gone(error)

    def gone(self, error: grpc.RpcError) -> HubringError:
        """Returns why this worker cannot continue, if the server does not come back after this call."""
        paused = self.pauses.seconds
        if paused > self._lease:
            return Fenced(
                f"this worker was suspended for about {paused:.0f} s, longer than its lease of"
                f" {self._lease:g} s, and the server at {self._address} has gone since ({describe(error)})."
                " The job went on without this worker, and is over; the server's last line shows how it ended"
            )
        return ServerUnreachable(
            f"the server at {self._address} has not answered for {self._silent():.1f} s ({describe(error)})."
            f" The server stopped or the network is down. {RESTART_ALL}"
        )

    def _silent(self) -> float:
        return self._clock.now() - self._heard - self.pauses.seconds
