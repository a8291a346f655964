"""No turned bit and no missing byte gives a message another meaning."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from hubring.ps.core.messages import (
    NO_REQUEST,
    Pull,
    Push,
)
from hubring.ps.core.types import Sender
from hubring.ps.transport.base import Message
from hubring.ps.transport.checksum import DamagedHeader, opened, sealed
from hubring.ps.transport.decode import origin
from hubring.ps.transport.encode import encode_reply, encode_request
from hubring.ps.transport.grpc.frame import Assembly, MalformedFrame, to_frames
from hubring.ps.transport.memory.segment import Region
from hubring.ps.transport.shm.packet import Descriptor, Kind, unpack
from tests.support.transports.messages import content
from tests.support.transports.samples import FLAT, REPLIES, REQUESTS, SENDER

MESSAGES = [
    *(encode_request(request, 2**20) for request in REQUESTS),
    *(encode_reply(reply, 2**20) for reply in REPLIES),
]
PUSHED = encode_request(Push(SENDER, 4, 7, FLAT), 2**20)

Parts = list[bytes]
Read = Callable[[Parts], Message | None]


def as_zmq(message: Message) -> Parts:
    return [sealed(message), content(message)]


def from_zmq(parts: Parts) -> Message:
    return opened(parts[0], memoryview(parts[1]) if parts[1] else None)


def as_frames(message: Message) -> Parts:
    return list(to_frames(message))


def from_frames(parts: Parts) -> Message | None:
    assembly = Assembly()
    for part in parts:
        message = assembly.add(part)
    return message


def as_packet(message: Message) -> Parts:
    return [Descriptor(Kind.WINDOWED, 3, Region(1, 4096, 20), Region(2, 0, 20)).pack(message.header)]


def from_packet(parts: Parts) -> Message:
    descriptor, header = unpack(parts[0])
    return Message(header, memoryview(repr(descriptor).encode()))


WAYS: dict[str, tuple[Callable[[Message], Parts], Read]] = {
    "zmq": (as_zmq, from_zmq),
    "grpc": (as_frames, from_frames),
    "shm": (as_packet, from_packet),
}
REFUSALS = (DamagedHeader, MalformedFrame, ValueError)


def damaged(parts: Parts, chance: random.Random) -> Parts:
    """One bit turned, or the end of one part missing."""
    parts = list(parts)
    index = chance.choice([index for index, part in enumerate(parts) if part])
    part = bytearray(parts[index])
    if chance.random() < 0.8:
        part[chance.randrange(len(part))] ^= 1 << chance.randrange(8)
    else:
        del part[chance.randrange(len(part)) :]
    parts[index] = bytes(part)
    return parts


def accepted(count: int) -> Iterator[str]:
    """Yields every damage that passes as a message with another meaning."""
    for name, (write, read) in WAYS.items():
        for number, message in enumerate(MESSAGES):
            whole = write(message)
            came = read(whole)
            assert came is not None
            assert not came.damage
            chance = random.Random(f"{name} {number}")
            for attempt in range(count):
                try:
                    other = read(damaged(whole, chance))
                except REFUSALS:
                    continue
                if other is None or other.damage:
                    continue
                if (other.header, content(other)) != (came.header, content(came)):
                    yield f"{name}: attempt {attempt} on message {number}"


def test_no_damage_passes() -> None:
    assert list(accepted(20)) == []


@pytest.mark.slow
@pytest.mark.full
def test_no_damage_passes_in_many_tries() -> None:
    assert list(accepted(4_000)) == []


def test_a_payload_that_does_not_match_is_left_out_and_its_header_stays() -> None:
    header, payload = as_zmq(PUSHED)
    came = opened(header, memoryview(payload[:-1] + b"?"))
    assert (came.header, came.payload) == (PUSHED.header, None)
    assert came.damage == "a payload of 20 bytes does not match its checksum"


def test_a_payload_that_is_missing_or_too_much_does_not_match() -> None:
    (header, payload), (bare, _) = as_zmq(PUSHED), as_zmq(encode_request(Pull(SENDER, 4), 2**20))
    assert opened(header, None).damage
    assert opened(header, memoryview(payload + b"\0")).damage
    assert opened(bare, memoryview(b"\0")).damage


def test_the_origin_of_a_damaged_message_is_its_number_and_sender_if_its_header_is_readable() -> None:
    number, sender = origin(PUSHED)
    assert (number, sender.rank) == (2**20, 3)
    assert origin(Message(b"")) == (NO_REQUEST, Sender(0, 0))
    assert origin(Message(b"no header")) == (NO_REQUEST, Sender(0, 0))


@pytest.mark.parametrize("nbytes", [0, 1, 9, 19, 20])
def test_a_header_that_is_too_short_for_its_checksums_is_damaged(nbytes: int) -> None:
    with pytest.raises(DamagedHeader, match=f"a header of {nbytes} bytes does not match its checksum"):
        opened(sealed(Message(b""))[:nbytes] if nbytes < 20 else bytes(20), None)
