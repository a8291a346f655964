"""A TCP proxy on this machine, whose stream a fault can change."""

from __future__ import annotations

import time
from functools import partial

from tests.campaign.tampering import Tampering
from tests.support.transports.relay import Relay as PlainRelay

HOST = "127.0.0.1"


class Relay(PlainRelay):
    """Forwards connections to a port.

    Args:
        target: The port.
    """

    def __init__(self, target: int) -> None:
        self._tampering: Tampering | None = None
        self._delay = 0.0
        super().__init__(target, partial(self._change, "server"), partial(self._change, "worker"))

    def arm(self, tampering: Tampering, delay: float = 0.0) -> None:
        """Changes one chunk from now on; `delay` is in seconds."""
        self._tampering, self._delay = tampering, delay

    def _change(self, toward: str, chunk: bytes) -> bytes:
        """Returns a chunk, or what a fault makes of it."""
        tampering = self._tampering
        if tampering is None or not tampering.takes(chunk, toward):
            return chunk
        if tampering.kind == "delay":
            time.sleep(self._delay)
        tampering.fired.set()
        return tampering.changed(chunk)
