"""How much of one peer's may wait in this process."""

from __future__ import annotations

import threading

from hubring.ps.transport.base import Message

BOUND = 16 << 20
"""Bytes that wait before no more is read: some slices, so that one is on the wire while another is summed.

With 4 MiB, 100 MB there and back took 131 ms; with 8 to 32 MiB 103 to 114.
"""

MESSAGE_BYTES = 64 << 10
"""What a message weighs beside its bytes, so that small ones are bounded as well: in number."""


def weigh(message: Message) -> int:
    """Bytes of a backlog that a message fills."""
    payload = message.payload.nbytes if message.payload is not None else 0
    return MESSAGE_BYTES + len(message.header) + payload


class Backlog:
    """Counts the bytes of one peer that wait here, both ways; who reads from the peer pauses at the bound.

    So a peer that sends faster than it is served, or does not read its replies,
    fills this much memory and then its own: the wire's flow control stops it.
    Requests that were taken and not answered yet are not counted: a round may
    need many more of them before it answers the first.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        """At the bound or beyond it, by less than one message."""
        return self._nbytes >= BOUND

    def add(self, nbytes: int) -> None:
        """Something waits from now on; never blocks."""
        with self._changed:
            self._nbytes += nbytes

    def remove(self, nbytes: int) -> None:
        """Something waits no longer."""
        with self._changed:
            self._nbytes -= nbytes
            if not self.full:
                self._changed.notify_all()

    def await_room(self) -> None:
        """Returns when the backlog is not full, or was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.full)

    def close(self) -> None:
        """Lets whoever waits for room go, and nobody wait again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
