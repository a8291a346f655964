"""No missing byte gives a message another meaning. The tests of `tests.campaign.flips` turn bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hubring.ps.core.messages import NO_REQUEST, Pull, Push
from hubring.ps.core.types import Sender
from hubring.ps.transport.base import DamagedHeader, Message, opened, sealed
from hubring.ps.transport.decode import origin
from hubring.ps.transport.encode import encode_request
from hubring.ps.transport.mapping import Region
from hubring.ps.transport.shm.packet import Descriptor, Kind, unpack
from tests.campaign.flips.messages import Read, Wire, wires
from tests.support.transports.messages import content
from tests.support.transports.samples import FLAT, SENDER

PUSHED = encode_request(Push(SENDER, 4, 7, FLAT), 2**20)
HEADER, PAYLOAD = sealed(PUSHED), content(PUSHED)


def packed(message: Message) -> list[bytes]:
    return [Descriptor(Kind.WINDOWED, 3, Region(1, 4096, 20), Region(2, 0, 20)).pack(message.header)]


def unpacked(packets: Sequence[bytes]) -> Read:
    descriptor, header = unpack(packets[0])
    return repr(descriptor).encode(), header


WIRES = [
    *(wire for wire in wires() if "shm" not in wire.name),  # of its datagrams, a part may be without meaning
    Wire("shm, one packet", packed, unpacked, (DamagedHeader, ValueError)),
]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_no_message_passes_without_its_end(wire: Wire) -> None:
    for pieces in wire._sent:
        whole = wire._decode(pieces)
        assert whole is not None
        for index, piece in enumerate(pieces):
            for end in range(len(piece)):
                try:
                    read = wire._decode([*pieces[:index], piece[:end], *pieces[index + 1 :]])
                except wire._errors:
                    continue
                assert read in (None, whole)


def test_a_payload_that_does_not_match_is_left_out_and_its_header_stays() -> None:
    came = opened(HEADER, memoryview(PAYLOAD[:-1] + b"?"))
    assert (came.header, came.payload) == (PUSHED.header, None)
    assert came.damage == "a payload of 20 bytes does not match its checksum"


def test_a_payload_that_is_missing_or_too_much_does_not_match() -> None:
    assert opened(HEADER, None).damage
    assert opened(HEADER, memoryview(PAYLOAD + b"\0")).damage
    assert opened(sealed(encode_request(Pull(SENDER, 4), 2**20)), memoryview(b"\0")).damage


def test_what_stays_on_the_host_has_a_checked_header_and_an_unchecked_payload() -> None:
    header = sealed(PUSHED, checked=False)
    assert opened(header, memoryview(b"any"), checked=False) == Message(PUSHED.header, memoryview(b"any"))
    with pytest.raises(DamagedHeader):
        opened(header[:-1] + bytes([header[-1] ^ 1]), None, checked=False)


def test_the_origin_of_a_damaged_message_is_its_number_and_sender_if_its_header_is_readable() -> None:
    number, sender = origin(PUSHED)
    assert (number, sender.rank) == (2**20, 3)
    assert origin(Message(b"")) == (NO_REQUEST, Sender(0, 0))
    assert origin(Message(b"no header")) == (NO_REQUEST, Sender(0, 0))
