"""Numbered requests, and a client's calls with them."""

from __future__ import annotations

import random
import select

from xxhash import xxh3_64_intdigest

from hubring.protos import data_pb2 as pb
from hubring.ps.core.errors import ConnectionLost
from hubring.ps.transport.base import Connection, Message

PATIENCE = 10.0
"""Seconds after which a check fails."""


def request(number: int, payload: memoryview | None = None, text: str = "") -> Message:
    """Returns a request that every transport can carry."""
    nbytes = payload.nbytes if payload is not None else 0
    header = pb.Header(request=number, payload_bytes=nbytes, contribute=pb.Contribute(name=text))
    return Message(header.SerializeToString(), payload)


def summed(header: pb.Header, payload: bytes = b"") -> pb.Header:
    """Returns a header with its checksums, as data.proto defines them."""
    whole = pb.Header()
    whole.CopyFrom(header)
    whole.payload_checksum = xxh3_64_intdigest(payload)
    whole.ClearField("checksum")
    whole.checksum = xxh3_64_intdigest(whole.SerializeToString())
    return whole


def number_of(message: Message) -> int:
    """Returns the number that was passed to `request`."""
    return pb.Header.FromString(message.header).request


def content(message: Message) -> bytes:
    """Returns the payload; a missing payload equals an empty one."""
    return b"" if message.payload is None else bytes(message.payload)


def noise(nbytes: int, seed: int = 0) -> memoryview:
    """Returns random bytes in memory unknown to the transport; the same for the same seed."""
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


def await_readable(connection: Connection) -> None:
    """Waits until the connection has a reply or is lost."""
    poller = select.poll()
    poller.register(connection.waitable, select.POLLIN)
    assert poller.poll(int(1000 * PATIENCE)), f"nothing to read within {PATIENCE:g} s"


def replies(connection: Connection, count: int = 1) -> list[Message]:
    """Returns the next `count` replies."""
    connection.flush()
    messages: list[Message] = []
    while len(messages) < count:
        await_readable(connection)
        messages += connection.receive()
    assert len(messages) == count, f"{len(messages)} replies where {count} were due"
    return messages


def ask(connection: Connection, message: Message, into: memoryview | None = None) -> Message:
    """Sends one request, and returns its reply."""
    connection.send(message, into)
    (reply,) = replies(connection)
    return reply


def is_echoed(connection: Connection, nbytes: int = 5) -> bool:
    """Whether a request with so many bytes comes back."""
    sent = request(1, noise(nbytes))
    return content(ask(connection, sent)) == content(sent)


def await_loss(connection: Connection) -> None:
    """Returns once the connection has reported its loss."""
    while True:
        await_readable(connection)
        try:
            assert not connection.receive(), "a reply out of nowhere"
        except ConnectionLost:
            return
