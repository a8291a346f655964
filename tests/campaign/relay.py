"""A TCP proxy on this machine, whose stream a fault can change."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from tests.campaign.tampering import Tampering

HOST = "127.0.0.1"
CHUNK = 1 << 16


class Relay:
    """Forwards connections to a port.

    Args:
        target: The port.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._tampering: Tampering | None = None
        self._delay = 0.0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closing = False
        self.forwarded = 0
        """Bytes that passed, in both directions."""
        self._door = socket.create_server((HOST, 0))
        self.port: int = self._door.getsockname()[1]
        self._start(self._accept)

    def arm(self, tampering: Tampering, delay: float = 0.0) -> None:
        """Changes one chunk from now on; `delay` is in seconds."""
        self._tampering, self._delay = tampering, delay

    def cut(self) -> int:
        """Closes all connections; returns their number. The relay accepts new ones."""
        with self._lock:
            ends = list(self._open)
        for end in ends:
            _shut(end)
        return len(ends) // 2

    def close(self) -> None:
        self._closing = True
        _shut(self._door)
        self._door.close()
        while self._threads:
            self.cut()
            with self._lock:
                thread = self._threads.pop()
            thread.join()

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the relay was closed
            while not self._closing:
                near, _ = self._door.accept()
                self._connect(near)

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection((HOST, self._target))
        except OSError:  # the server has ended
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {near, far}
        both = threading.Barrier(2)
        self._start(self._forward, near, far, "server", both)
        self._start(self._forward, far, near, "worker", both)

    def _forward(
        self, source: socket.socket, sink: socket.socket, toward: str, both: threading.Barrier
    ) -> None:
        with suppress(OSError):  # one of the ends has closed
            while chunk := source.recv(CHUNK):
                self.forwarded += len(chunk)
                if not self._send(chunk, sink, toward):
                    break
        _shut(sink)
        _shut(source)
        if both.wait() == 0:
            with self._lock:
                self._open -= {source, sink}
            source.close()
            sink.close()

    def _send(self, chunk: bytes, sink: socket.socket, toward: str) -> bool:
        """Sends a chunk, or what a fault makes of it; returns whether the connection stays open."""
        tampering = self._tampering
        if tampering is None or not tampering.takes(chunk, toward):
            sink.sendall(chunk)
            return True
        if tampering.kind == "delay":
            time.sleep(self._delay)
        tampering.fired.set()
        for piece in tampering.pieces(chunk):
            sink.sendall(piece)
        return tampering.kind != "truncate"


def _shut(end: socket.socket) -> None:
    with suppress(OSError):  # already closed
        end.shutdown(socket.SHUT_RDWR)
