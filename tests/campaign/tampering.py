"""What a fault does to one chunk of a TCP stream."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field


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
