"""Numbered requests, and what a client does with them."""

from __future__ import annotations

import random
import select

from hubring.protos import data_pb2 as pb
from hubring.ps.core.errors import ConnectionLost
from hubring.ps.transport.base import Connection, Message

PATIENCE = 10.0
"""Seconds after which a check gives up."""


def request(number: int, payload: memoryview | None = None, text: str = "") -> Message:
    """A message that every transport carries."""
    nbytes = payload.nbytes if payload is not None else 0
    header = pb.Header(request=number, payload_bytes=nbytes, contribute=pb.Contribute(name=text))
    return Message(header.SerializeToString(), payload)


def number_of(message: Message) -> int:
    """The number that was given to `request`."""
    return pb.Header.FromString(message.header).request


def content(message: Message) -> bytes:
    """The payload; none and an empty one are the same."""
    return b"" if message.payload is None else bytes(message.payload)


def noise(nbytes: int, seed: int = 0) -> memoryview:
    """Bytes from nowhere a transport knows, the same for the same seed."""
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


def await_readable(connection: Connection) -> None:
    """Returns once the connection has something to say."""
    poller = select.poll()
    poller.register(connection.waitable, select.POLLIN)
    assert poller.poll(int(1000 * PATIENCE)), f"nothing to read within {PATIENCE:g} s"


def replies(connection: Connection, count: int = 1) -> list[Message]:
    """The next `count` replies."""
    connection.flush()
    messages: list[Message] = []
    while len(messages) < count:
        await_readable(connection)
        messages += connection.receive()
    assert len(messages) == count, f"{len(messages)} replies where {count} were due"
    return messages


def ask(connection: Connection, message: Message, into: memoryview | None = None) -> Message:
    """Sends one request and returns its reply."""
    connection.send(message, into)
    (reply,) = replies(connection)
    return reply


def await_loss(connection: Connection) -> None:
    """Returns once the connection has told that it is lost."""
    while True:
        await_readable(connection)
        try:
            assert not connection.receive(), "a reply out of nowhere"
        except ConnectionLost:
            return
