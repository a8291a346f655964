"""Checksums over the messages that leave a process.

A bit that a cable, a network card or a switch turns can pass TCP's 16-bit sum. So a header ends with two
fields of data.proto: the payload's checksum, and the checksum of all header bytes before it. A reader checks
the header first, by itself, so that it can trust the number by which it asks for a payload again.

XXH3 misses a change once in 2^64. It reads 63 GB/s from a core's cache and 11 GB/s from memory, without the
GIL. CRC32C (google-crc32c) reads 28 GB/s from the cache. With checksums, 100 MiB there and back with ZeroMQ
over loopback took 4 % more CPU time (the fastest of 8 in turns, beside busy cores; 11 % in the median).
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

from hubring.ps.transport.base import MAX_HEADER, Message

_FIELD = struct.Struct("<HQ")
"""A fixed64 field: its tag of two bytes, and its value."""
_PAYLOAD_TAG, _HEADER_TAG = 0x01F1, 0x01F9  # fields 30 and 31, as protobuf writes them

MAX_SEALED = MAX_HEADER + 2 * _FIELD.size
"""Maximum bytes of a sealed header."""


class DamagedHeader(ValueError):
    """A header does not match its checksum, so nothing in it can be trusted."""


def sealed(message: Message) -> bytes:
    """Returns a message's header with its checksums."""
    header = message.header + _FIELD.pack(_PAYLOAD_TAG, _digest(message.payload))
    return header + _FIELD.pack(_HEADER_TAG, xxh3_64_intdigest(header))


def verify_header(header: bytes) -> None:
    """Verifies a sealed header.

    Raises:
        DamagedHeader: It does not match its checksum.
    """
    body, field = header[: -_FIELD.size], header[-_FIELD.size :]
    if field != _FIELD.pack(_HEADER_TAG, xxh3_64_intdigest(body)):
        raise DamagedHeader(f"a header of {len(header)} bytes does not match its checksum")


def opened(header: bytes, payload: memoryview | None) -> Message:
    """Returns the message of a sealed header and a payload. A payload that does not match is left out.

    Raises:
        DamagedHeader: The header does not match its checksum.
    """
    verify_header(header)
    body, field = header[: -2 * _FIELD.size], header[-2 * _FIELD.size : -_FIELD.size]
    if field != _FIELD.pack(_PAYLOAD_TAG, _digest(payload)):
        nbytes = 0 if payload is None else payload.nbytes
        return Message(body, damage=f"a payload of {nbytes} bytes does not match its checksum")
    return Message(body, payload)


def _digest(payload: memoryview | None) -> int:
    return xxh3_64_intdigest(b"" if payload is None else payload)
