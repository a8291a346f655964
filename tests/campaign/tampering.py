"""What a fault does to one chunk of a TCP stream, and the proxy that does it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from tests.support.transports.relay import Relay as PlainRelay


@dataclass
class Tampering:
    """Changes the first chunk that it may, once.

    Attributes:
        kind: delay, drop, duplicate, truncate or corrupt.
        toward: The receiver of that chunk: `server` or `worker`.
        smallest: Bytes of the smallest chunk that is changed.
        draw: Chooses the bit to flip.
        fired: Set once a chunk was changed.
    """

    kind: str
    toward: str
    smallest: int
    draw: random.Random
    fired: threading.Event = field(default_factory=threading.Event)
    _once: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, chunk: bytes, toward: str) -> bool:
        """Whether this chunk is the one. True for one chunk only, in whatever thread."""
        right = toward == self.toward and len(chunk) >= self.smallest
        return right and self._once.acquire(blocking=False)

    def changed(self, chunk: bytes) -> bytes:
        """Returns what is sent in place of the chunk; a part of it ends the connection."""
        match self.kind:
            case "drop":
                return b""
            case "duplicate":
                return chunk + chunk
            case "truncate":
                return chunk[: len(chunk) // 2]
            case "corrupt":
                return flipped(chunk, self.draw.randrange(8 * len(chunk)))
        return chunk


def flipped(chunk: bytes, bit: int) -> bytes:
    """Returns a copy with one bit changed."""
    copy = bytearray(chunk)
    copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


class Relay(PlainRelay):
    """Forwards TCP connections to a port of this machine; a fault can change their stream.

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
