"""A TCP relay between a worker and a shard that turns one bit of what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Change = Callable[[bytes], bytes]


class Recorder:
    """Changes nothing, and keeps what passes."""

    def __init__(self) -> None:
        self.seen = bytearray()

    def __call__(self, data: bytes) -> bytes:
        self.seen += data
        return data


class BitFlip:
    """Turns the lowest bit of the last byte of a marker, the first `times` times that it passes."""

    def __init__(self, marker: bytes, times: int = 1) -> None:
        self._marker = marker
        self._left = times
        self._passed = b""
        self.fired = 0

    def __call__(self, data: bytes) -> bytes:
        before = len(self._passed)
        seen, at = bytearray(self._passed + data), -1
        while self._left and (at := seen.find(self._marker, at + 1)) >= 0:
            seen[at + len(self._marker) - 1] ^= 1
            self._left -= 1
            self.fired += 1
        # The marker may be split, so its last byte is always among those that have not passed.
        self._passed = bytes(seen[-len(self._marker) + 1 :])
        return bytes(seen[before:])


class Relay:
    """Relays every connection to a shard's address.

    Args:
        port: The shard's port.
        to_shard: Changes what workers send.
        to_worker: Changes what the shard sends.
    """

    def __init__(self, port: int, to_shard: Change = bytes, to_worker: Change = bytes) -> None:
        self._far, self._changes = port, (to_shard, to_worker)
        self._lock = threading.Lock()
        """Held while a change is made, as several connections share it."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.forwarded = 0
        """Bytes that passed, in both directions."""
        self._sockets: list[socket.socket] = []
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="relay")
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._connect(self._listener.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._far))
        except OSError:  # the server has ended
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets += [near, far]
        with self._lock:
            self._open |= {near, far}
        for source, target, change in zip((near, far), (far, near), self._changes, strict=True):
            thread = threading.Thread(target=self._pass, args=(source, target, change), name="relay")
            self._threads.append(thread)
            thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, change: Change) -> None:
        with contextlib.suppress(OSError):  # either end closed
            while data := source.recv(1 << 16):
                with self._lock:
                    self.forwarded += len(data)
                    changed = change(data)
                target.sendall(changed)
                if 0 < len(changed) < len(data):  # a message was cut off
                    break
        self._shut(source, target)

    def _shut(self, *ends: socket.socket) -> None:
        for end in ends:
            with self._lock, contextlib.suppress(OSError):
                self._open.discard(end)
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> int:
        """Ends all connections; returns their number. The relay accepts new ones."""
        with self._lock:
            ends = list(self._open)
        self._shut(*ends)
        return len(ends) // 2

    def close(self) -> None:
        """Ends all connections and threads."""
        self._shut(self._listener)
        self._accepting.join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()
