"""data.proto's Frames, written and read by hand.

The bytes are what protobuf makes of a Frame, but a payload is not copied once
more on its way through a Python message, and lands where it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from google.protobuf.message import DecodeError

from hubring.protos import data_pb2 as pb
from hubring.ps.transport.base import MAX_PAYLOAD, Message
from hubring.ps.transport.memory import copy

CHUNK_BYTES = 1 << 20
"""Payload bytes of one frame, at most."""

_HEADER_TAG, _PAYLOAD_TAG = b"\x0a", b"\x12"

FindRoom = Callable[[int, int], "memoryview | None"]
"""Given a request's number and a payload's size, the memory in which it should land, if any."""


class MalformedFrame(ValueError):
    """Bytes that are no Frame, or one that does not fit those before it."""


def to_frames(message: Message) -> Iterator[bytes]:
    """A message as serialized Frames, the header in the first; made one by one, as they are asked for."""
    head = _HEADER_TAG + _varint(len(message.header)) + message.header
    payload = message.payload if message.payload is not None else memoryview(b"")
    for start in range(0, max(payload.nbytes, 1), CHUNK_BYTES):
        chunk = payload[start : start + CHUNK_BYTES]
        yield b"".join((head, _PAYLOAD_TAG, _varint(chunk.nbytes), chunk)) if chunk.nbytes else head
        head = b""


class Assembly:
    """Turns the Frames of one stream back into messages."""

    def __init__(self, find_room: FindRoom | None = None) -> None:
        self._find_room = find_room
        self._header = b""
        self._target = memoryview(b"")
        self._filled = 0
        self._landed = False

    def add(self, frame: bytes) -> Message | None:
        """The message that this frame completes, if it does.

        Raises:
            MalformedFrame: The peer does not keep to data.proto.
        """
        header, chunk = _parse(frame)
        if header is not None:
            message = self._begin(header, chunk)
            if message is not None:
                return message
        elif not self._target.nbytes:
            raise MalformedFrame("a frame without a header where a message should begin")
        return self._go_on(chunk)

    def _begin(self, header: bytes, chunk: memoryview) -> Message | None:
        if self._target.nbytes:
            raise MalformedFrame(f"a new message before the payload of the last was whole, at {self._filled}")
        request, nbytes = read_header(header)
        target = self._find_room(request, nbytes) if self._find_room is not None else None
        if chunk.nbytes == nbytes and (target is None or not nbytes):
            return Message(header, chunk if nbytes else None)
        self._landed = target is not None
        self._target = target if target is not None else np.empty(nbytes, np.uint8).data
        self._header, self._filled = header, 0
        return None

    def _go_on(self, chunk: memoryview) -> Message | None:
        room = self._target[self._filled :]
        if chunk.nbytes > room.nbytes or not chunk.nbytes:
            raise MalformedFrame(f"{chunk.nbytes} bytes more, where {room.nbytes} are due")
        copy(chunk, room)
        self._filled += chunk.nbytes
        if self._filled < self._target.nbytes:
            return None
        message = Message(self._header, self._target, self._landed)
        self._target = memoryview(b"")
        return message


def read_header(header: bytes) -> tuple[int, int]:
    """The number of the request and the size of its payload, of which a header tells in any stream.

    Raises:
        MalformedFrame: It does not parse, or promises more than a payload may have.
    """
    try:
        parsed = pb.Header.FromString(header)
    except DecodeError as error:
        raise MalformedFrame(f"{len(header)} bytes that are no header: {error}") from error
    if parsed.payload_bytes > MAX_PAYLOAD:
        raise MalformedFrame(f"{parsed.payload_bytes} bytes of payload; at most {MAX_PAYLOAD} travel at once")
    return parsed.request, parsed.payload_bytes


def _parse(frame: bytes) -> tuple[bytes | None, memoryview]:
    """A Frame's header, if it has one, and its payload."""
    view, header, payload, at = memoryview(frame), None, memoryview(b""), 0
    while at < len(frame):
        tag = frame[at : at + 1]
        length, start = _read_varint(frame, at + 1)
        at = start + length
        if at > len(frame):
            raise MalformedFrame(f"a field of {length} bytes in a frame of {len(frame)}")
        if tag == _HEADER_TAG and header is None:
            header = frame[start:at]
        elif tag == _PAYLOAD_TAG and not payload.nbytes:
            payload = view[start:at]
        else:
            raise MalformedFrame(f"a frame with a second or unknown field {tag.hex()}")
    return header, payload


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    number = 0
    for index, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise MalformedFrame("a length without an end")
