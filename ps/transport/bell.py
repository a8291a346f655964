"""A bell: one thread rings it to wake another thread's poller."""

from __future__ import annotations

import socket
import threading


class Bell:
    """Readable from the first `ring` until `clear`. `ring` is safe from any thread, even after `close`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._ringing = False
        self.waitable = self._reader.fileno()

    def ring(self) -> None:
        """Makes the bell readable. A second ring before `clear` has no effect."""
        with self._lock:
            if not self._ringing:
                self._ringing = True
                self._writer.send(b"!")

    def clear(self) -> None:
        """Silences the bell. Check for new work after this call, not before, to avoid missing a ring."""
        with self._lock:
            if self._ringing and self._reader.fileno() >= 0:
                self._ringing = False
                self._reader.recv(1)

    def close(self) -> None:
        """Closes the descriptors. Can be called twice."""
        with self._lock:
            self._ringing = True  # later rings do nothing
            self._reader.close()
            self._writer.close()
