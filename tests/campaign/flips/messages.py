"""The decoders of all wires: what one end encoded, the other reads after a bit flipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hubring.ps.transport.base import DamagedHeader, Message, opened, sealed
from hubring.ps.transport.encode import encode_reply, encode_request
from hubring.ps.transport.grpc.frame import Assembly, MalformedFrame, to_frames
from hubring.ps.transport.mapping import Region
from hubring.ps.transport.shm.packet import Descriptor, Kind, split, unpack
from tests.campaign.flips.place import Outcome
from tests.campaign.tampering import flipped
from tests.support.transports.samples import REPLIES, REQUESTS

LONGEST = 100
Read = tuple[bytes, bytes]
"""A message as its reader gets it: header and payload."""


def messages() -> list[Message]:
    """Returns messages of every kind, with at most LONGEST bytes of payload, so flips reach all parts."""
    encoded = [encode_request(request, number) for number, request in enumerate(REQUESTS)]
    encoded += [encode_reply(reply, number) for number, reply in enumerate(REPLIES)]
    return [each for each in encoded if each.payload is None or each.payload.nbytes <= LONGEST]


class Wire:
    """Bytes of all messages on one wire, and the decoder that reads them.

    Args:
        name: See `Place`.
        encode: Returns the pieces in which a message travels.
        decode: Returns what the reader gets; raises one of `errors` for what it refuses.
        errors: What a reader raises for damage.
    """

    def __init__(
        self,
        name: str,
        encode: Callable[[Message], Sequence[bytes]],
        decode: Callable[[Sequence[bytes]], Read | None],
        errors: tuple[type[Exception], ...],
    ) -> None:
        self.name, self.share = name, 1
        self._decode, self._errors = decode, errors
        self._sent = [list(map(bytes, encode(message))) for message in messages()]
        self._bits = [
            (number, piece, bit)
            for number, pieces in enumerate(self._sent)
            for piece, data in enumerate(pieces)
            for bit in range(8 * len(data))
        ]
        self.bits = len(self._bits)

    def flip(self, bit: int) -> Outcome:
        number, piece, at = self._bits[bit]
        pieces = list(self._sent[number])
        pieces[piece] = flipped(pieces[piece], at)
        try:
            read = self._decode(pieces)
        except self._errors:
            return Outcome.DETECTED
        if read is None:
            return Outcome.DETECTED
        return Outcome.HARMLESS if read == self._decode(self._sent[number]) else Outcome.SILENT


def _read(message: Message) -> Read | None:
    return None if message.damage else (message.header, bytes(message.payload or b""))


def _parts(message: Message) -> Sequence[bytes]:
    payload = [] if message.payload is None else [bytes(message.payload)]
    return [sealed(message), *payload]


def _from_parts(parts: Sequence[bytes]) -> Read | None:
    return _read(opened(parts[0], memoryview(parts[1]) if len(parts) > 1 else None))


def _from_frames(frames: Sequence[bytes]) -> Read | None:
    """Reads a message and the one that follows it in the stream."""
    assembly = Assembly()
    found = [message for frame in frames if (message := assembly.add(frame)) is not None]
    follower = [message for frame in to_frames(Message(b"", None)) if (message := assembly.add(frame))]
    assert len(follower) == 1
    if len(found) != 1:
        raise MalformedFrame(f"{len(found)} messages where one was sent")
    return _read(found[0])


def _train(message: Message) -> Sequence[bytes]:
    """Returns a datagram with two packets; the payload is in shared memory."""
    nbytes = 0 if message.payload is None else message.payload.nbytes
    region = Region(1, 4096, nbytes)
    packets = [
        Descriptor(kind, 9, region, region).pack(message.header) for kind in (Kind.REQUEST, Kind.LANDED)
    ]
    return [b"".join(len(packet).to_bytes(4, "little") + packet for packet in packets)]


def _from_train(trains: Sequence[bytes]) -> Read:
    packets = [unpack(packet.data) for packet in split(trains[0], None)]
    return repr([descriptor for descriptor, _ in packets]).encode(), b"|".join(
        header for _, header in packets
    )


def wires() -> list[Wire]:
    """Returns the places of all wires."""
    return [
        Wire("zmq, parts", _parts, _from_parts, (DamagedHeader,)),
        Wire(
            "grpc, frames",
            lambda message: list(to_frames(message)),
            _from_frames,
            (DamagedHeader, MalformedFrame),
        ),
        Wire("shm, packets", _train, _from_train, (DamagedHeader, ValueError)),
    ]
