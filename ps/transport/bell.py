"""A bell: one thread rings it, another polls it among its other wires."""

from __future__ import annotations

import socket
import threading


class Bell:
    """Readable from the first `ring` until `clear`. Ringing is safe from any thread, also after `close`."""

    def __init__(self) -> None:
        self._ear, self._hammer = socket.socketpair()
        self._ear.setblocking(False)
        self._hammer.setblocking(False)
        self._lock = threading.Lock()
        self._rung = False
        self.waitable = self._ear.fileno()

    def ring(self) -> None:
        """Makes the bell readable; ringing twice is ringing once."""
        with self._lock:
            if not self._rung:
                self._rung = True
                self._hammer.send(b"!")

    def clear(self) -> None:
        """Silences the bell. Look for the news after this, not before: else one may be missed."""
        with self._lock:
            if self._rung and self._ear.fileno() >= 0:
                self._rung = False
                self._ear.recv(1)

    def close(self) -> None:
        """Gives the descriptors back; may be called twice."""
        with self._lock:
            self._rung = True  # nobody is listening: later rings go nowhere
            self._ear.close()
            self._hammer.close()
