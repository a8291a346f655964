"""Programs that listen: one like a shard's ZeroMQ, which lets everybody in, and one like any other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + b"\x01" + bytes(31)
_WELCOME = b"\x07WELCOME"
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"


@contextmanager
def impostor(act: Callable[[socket.socket], object]) -> Iterator[tuple[str, list[bytes]]]:
    """Gives its address, and what each connection sent first: its HELLO with a name and a password.

    Args:
        act: Called with each connection once its handshake is complete; the connection is closed then.
    """
    heard: list[bytes] = []

    def answer(line: socket.socket) -> None:
        line.settimeout(10.0)
        heard.append(_shake_hands(line))
        act(line)

    with listening(answer) as address:
        yield f"tcp://{address}", heard


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Answers every caller, one after the other, and hangs up; gives the address."""

    def serve() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                line, _ = listener.accept()
                with line, suppress(OSError):
                    answer(line)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _shake_hands(line: socket.socket) -> bytes:
    line.sendall(_GREETING)
    _read(line, 64)
    hello = read_frame(line)
    for command in (_WELCOME, _READY):
        line.sendall(bytes([4, len(command)]) + command)
        if command is _WELCOME:
            read_frame(line)
    return hello


def read_frame(line: socket.socket) -> bytes:
    """Returns a short frame, without its flags and length."""
    return _read(line, _read(line, 2)[1])


def _read(line: socket.socket, count: int) -> bytes:
    came = b""
    while len(came) < count:
        data = line.recv(count - len(came))
        if not data:
            raise ConnectionResetError
        came += data
    return came
