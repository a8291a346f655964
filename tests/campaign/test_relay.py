"""A relay forwards every byte, and makes exactly one fault."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.campaign.relay import HOST, Relay
from tests.campaign.tampering import Tampering, flipped


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it receives."""
    door = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                line, _ = door.accept()
            except OSError:  # the test is over
                return
            with line:
                while chunk := line.recv(1 << 16):
                    line.sendall(chunk)

    thread = threading.Thread(target=serve)
    thread.start()
    yield door.getsockname()[1]
    door.shutdown(socket.SHUT_RDWR)
    door.close()
    thread.join()


@pytest.fixture
def relay(echo: int) -> Iterator[Relay]:
    relay = Relay(echo)
    yield relay
    relay.close()


def echoed(relay: Relay, *chunks: bytes) -> bytes:
    """Sends chunks, the next once the answer to the last is there; returns all answers until the end."""
    with socket.create_connection((HOST, relay.port), 10) as line:
        answers = []
        for chunk in chunks:
            line.sendall(chunk)
            answers.append(line.recv(1 << 16))
        line.shutdown(socket.SHUT_WR)
        while rest := line.recv(1 << 16):
            answers.append(rest)
        return b"".join(answers)


def tampering(kind: str, smallest: int = 1) -> Tampering:
    return Tampering(kind, "server", smallest, random.Random(1))


def test_every_byte_passes(relay: Relay) -> None:
    content = random.Random(1).randbytes(50_000)
    assert echoed(relay, content) == content
    assert relay.forwarded == 100_000


def test_one_chunk_is_doubled(relay: Relay) -> None:
    fault = tampering("duplicate", smallest=4)
    relay.arm(fault)
    assert echoed(relay, b"abc", b"defg", b"hijk").count(b"defg") == 2
    assert fault.fired.is_set()


def test_one_bit_is_changed(relay: Relay) -> None:
    relay.arm(tampering("corrupt"))
    answer = echoed(relay, b"abc", b"def")
    assert sum((got ^ sent).bit_count() for got, sent in zip(answer, b"abcdef", strict=True)) == 1


def test_a_truncated_chunk_ends_its_connection(relay: Relay) -> None:
    relay.arm(tampering("truncate"))
    with socket.create_connection((HOST, relay.port), 10) as line:
        line.sendall(b"abcd")
        received = b"".join(iter(lambda: line.recv(1 << 16), b""))
    assert received in (b"", b"ab")  # the end may overtake the answer
    assert echoed(relay, b"abcd") == b"abcd"


def test_a_cut_closes_all_connections_and_accepts_new_ones(relay: Relay) -> None:
    with socket.create_connection((HOST, relay.port), 10) as line:
        line.sendall(b"abc")
        assert line.recv(10) == b"abc"
        assert relay.cut() == 1
        assert line.recv(10) == b""
    assert echoed(relay, b"abc") == b"abc"


def test_a_dropped_chunk_leaves_nothing() -> None:
    assert tampering("drop").pieces(b"abc") == []
    assert tampering("delay").pieces(b"abc") == [b"abc"]


def test_only_one_chunk_of_the_right_size_and_direction_is_taken() -> None:
    fault = tampering("drop", smallest=4)
    asked = [(b"abc", "server"), (b"abcd", "worker"), (b"abcd", "server"), (b"abcd", "server")]
    assert [fault.takes(*each) for each in asked] == [False, False, True, False]


def test_a_flipped_bit_flips_back() -> None:
    assert flipped(b"abc", 9) == b"a`c"
    assert flipped(flipped(b"abc", 9), 9) == b"abc"
