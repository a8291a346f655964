"""Encodes and decodes data.proto's Frames by hand.

The bytes are protobuf's encoding of a Frame. Python's protobuf would copy a payload once
more, and could not let it land in the caller's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from google.protobuf.message import DecodeError

from hubring.protos import data_pb2 as pb
from hubring.ps.transport.base import MAX_PAYLOAD, MAX_SEALED, Message, opened, sealed, verify_header
from hubring.ps.transport.mapping import copy, land

CHUNK_BYTES = 4 << 20
"""Maximum payload bytes of one frame. In most jobs that is a slice, which then needs no joining.

A frame wakes two threads of Python. On 2 busy cores 100 MB there and back took two workers 636 ms, and 975
with frames of 1 MiB.
"""

MAX_FRAME = CHUNK_BYTES + MAX_SEALED + 16
"""Maximum bytes of one frame: a header, a chunk and the tags and lengths of both."""

_HEADER_TAG, _PAYLOAD_TAG = b"\x0a", b"\x12"

_ALIGNMENT = 4
"""Bytes. A payload that begins at a multiple of it is read without a copy, unless its elements are larger."""

_MAX_SIZE = 5
"""Bytes of a length that every reader of protobuf takes, though fewer would do."""

FindRoom = Callable[[int, int], "memoryview | None"]
"""Takes a request's number and a payload's size. Returns the memory for the payload, or None."""


class MalformedFrame(ValueError):
    """Bytes that are not a Frame, or a Frame that does not continue the previous ones."""


def to_frames(message: Message, checked: bool = True) -> Iterator[bytes]:
    """Yields a message as serialized Frames, the header in the first. Each is made on demand.

    Args:
        message: What to send.
        checked: Whether its payload has a checksum.
    """
    header = sealed(message, checked)
    payload = message.payload if message.payload is not None else memoryview(b"")
    size, first = len(_varint(len(header))), len(_varint(min(payload.nbytes, CHUNK_BYTES)))
    spare = -(len(_HEADER_TAG + _PAYLOAD_TAG) + size + len(header) + first) % _ALIGNMENT
    head = _HEADER_TAG + _varint(len(header), min(spare, _MAX_SIZE - size)) + header
    for start in range(0, max(payload.nbytes, 1), CHUNK_BYTES):
        chunk = payload[start : start + CHUNK_BYTES]
        yield b"".join((head, _PAYLOAD_TAG, _varint(chunk.nbytes), chunk)) if chunk.nbytes else head
        head = b""


class Assembly:
    """Assembles messages from the Frames of one stream.

    A payload is copied to its room only when it is complete and matches its checksum, if it is `checked`.
    """

    def __init__(self, find_room: FindRoom | None = None, checked: bool = True) -> None:
        self._find_room = find_room
        self._checked = checked
        self._header = b""
        self._request = 0
        self._payload = memoryview(b"")
        self._filled = 0

    def add(self, frame: bytes) -> Message | None:
        """Returns the message that this frame completes, or None.

        Raises:
            DamagedHeader: A header does not match its checksum.
            MalformedFrame: The peer violates data.proto.
        """
        if len(frame) > MAX_FRAME:
            raise MalformedFrame(f"a frame of {len(frame)} bytes; the maximum is {MAX_FRAME}")
        header, chunk = _parse(frame)
        if header is not None:
            message = self._begin(header, chunk)
            if message is not None:
                return message
        elif not self._payload.nbytes:
            raise MalformedFrame("the first frame of a message has no header")
        return self._go_on(chunk)

    def _begin(self, header: bytes, chunk: memoryview) -> Message | None:
        if self._payload.nbytes:
            raise MalformedFrame(
                f"a new message begins before the last payload is complete, at byte {self._filled}"
            )
        verify_header(header)
        self._header = header
        self._request, nbytes = read_header(header)
        if chunk.nbytes == nbytes:
            return self._complete(chunk if nbytes else None)
        self._payload, self._filled = np.empty(nbytes, np.uint8).data, 0
        return None

    def _go_on(self, chunk: memoryview) -> Message | None:
        room = self._payload[self._filled :]
        if chunk.nbytes > room.nbytes or not chunk.nbytes:
            raise MalformedFrame(f"a frame with {chunk.nbytes} payload bytes; {room.nbytes} remain")
        copy(chunk, room)
        self._filled += chunk.nbytes
        if self._filled < self._payload.nbytes:
            return None
        payload, self._payload = self._payload, memoryview(b"")
        return self._complete(payload)

    def _complete(self, payload: memoryview | None) -> Message:
        message = opened(self._header, payload, self._checked)
        if self._find_room is None or message.damage:
            return message
        landed = land(
            message.payload, self._find_room(self._request, 0 if payload is None else payload.nbytes)
        )
        return message if landed is None else Message(message.header, landed, landed=True)


def read_header(header: bytes) -> tuple[int, int]:
    """Returns a header's request number and payload size.

    Raises:
        MalformedFrame: The header does not parse, or the header or its payload is too large.
    """
    if len(header) > MAX_SEALED:
        raise MalformedFrame(f"a header of {len(header)} bytes; the maximum is {MAX_SEALED}")
    try:
        parsed = pb.Header.FromString(header)
    except DecodeError as error:
        raise MalformedFrame(f"invalid header of {len(header)} bytes: {error}") from error
    if parsed.payload_bytes > MAX_PAYLOAD:
        raise MalformedFrame(f"a payload of {parsed.payload_bytes} bytes; the maximum is {MAX_PAYLOAD}")
    return parsed.request, parsed.payload_bytes


def _parse(frame: bytes) -> tuple[bytes | None, memoryview]:
    """Returns a Frame's header, if it has one, and its payload."""
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


def _varint(number: int, spare: int = 0) -> bytes:
    """Encodes a number, in as many bytes more than it needs."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    for _ in range(spare):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at `at`, and the position after it."""
    number = 0
    for index, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise MalformedFrame("a length that does not end within 10 bytes or within the frame")
