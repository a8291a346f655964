"""What is said of an address where no server answers."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

import pytest

from hubring.ps.transport.host import probe
from tests.support.transports.impostor import listening

Answer = Callable[[socket.socket], None]


def speak_tls(line: socket.socket) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(line, server_side=True)


def speak_http(line: socket.socket) -> None:
    line.recv(1000)
    line.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")


def speak_grpc(line: socket.socket) -> None:
    line.recv(1000)
    line.sendall(b"\0\0\x12\4\0\0\0\0\0")  # HTTP/2's frame of settings, as gRPC's server begins


def mutter(line: socket.socket) -> None:
    line.recv(1000)
    line.sendall(b"220 mail.example ESMTP\r\n")


def hang_up(line: socket.socket) -> None:
    """Says nothing and is gone."""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (speak_tls, "uses TLS, but is not a ps-server"),
        (speak_http, "a web server listens on that port"),
        (speak_grpc, "if you trust the network, pass --insecure"),
        (mutter, "is not ps-server"),
        (hang_up, "is not ps-server"),
    ],
)
def test_the_probe_names_the_process_that_listens(answer: Answer, words: str) -> None:
    with listening(answer) as address:
        assert words in probe(address)


def test_a_port_without_anybody_is_told() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert probe(f"127.0.0.1:{free.getsockname()[1]}") == "no process listens on that port"


def test_a_silent_process_is_distinguished_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.transport.host.SECONDS", 0.02)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        assert "does not answer; it is stopped" in probe(f"127.0.0.1:{mute.getsockname()[1]}")
