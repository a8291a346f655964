"""The seal on loopback and of `--plain-data`: headers are encrypted, and payloads authenticated.

Law: an incarnation proves who sends, so no peer on the path may see one. Such a peer can read gradients, but
cannot change a message, make one, or repeat a request. AES-256 with GCM (NIST SP 800-38D) does both at once.
It needs a nonce that no other message of its key has: each connection has a key of its own, and each end
counts what it sends.

GCM authenticates 14 to 18 GB/s from memory, as fast as XXH3 reads it. blake2b reads 0.7 GB/s.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADCipherContext, Cipher, algorithms, modes

from hubring.ps.transport.base import DamagedHeader, Message
from hubring.ps.transport.zmq.socket import MAX_EXTRA, Seal

_NUMBER = struct.Struct("<Q")
_TAG_BYTES = MAX_EXTRA - _NUMBER.size
_SLICE_BYTES = 1 << 30
"""Payload bytes of one call to OpenSSL, which counts them in 31 bits."""


class KeyedSeal(Seal):
    """One end of a connection.

    Args:
        secret: 32 random bytes that the shard and the members of its job know.
        connection: Names the connection; no other one of this shard has the name.
        serves: Whether this end receives requests. Their numbers must rise, so that none counts twice.
        numbers: Numbers for the messages that this end sends, none of them twice.
    """

    def __init__(self, secret: bytes, connection: bytes, *, serves: bool, numbers: Iterator[int]) -> None:
        self._key = algorithms.AES256(hashlib.blake2s(connection, key=secret, person=b"hub data").digest())
        self._serves = serves
        self._numbers = numbers
        self._last = -1

    def seal(self, message: Message) -> bytes:
        number = _NUMBER.pack(next(self._numbers))
        context = Cipher(self._key, _mode(number, by_server=self._serves)).encryptor()
        _authenticate(context, message.payload)
        return number + context.update(message.header) + context.finalize() + context.tag

    def open(self, first: bytes, payload: memoryview | None) -> Message:
        if len(first) < MAX_EXTRA:
            raise DamagedHeader(f"a first part of {len(first)} bytes is too short for a number and a tag")
        number, body, tag = first[: _NUMBER.size], first[_NUMBER.size : -_TAG_BYTES], first[-_TAG_BYTES:]
        context = Cipher(self._key, _mode(number, tag, by_server=not self._serves)).decryptor()
        _authenticate(context, payload)
        try:
            header = context.update(body) + context.finalize()
        except InvalidTag as error:
            raise DamagedHeader(
                f"a message with a first part of {len(first)} bytes was changed, or made without the"
                " connection's key"
            ) from error
        (count,) = _NUMBER.unpack(number)
        if self._serves and count <= self._last:
            raise DamagedHeader(f"message {count} came again, after message {self._last}")
        self._last = count
        return Message(header, payload)


def _mode(number: bytes, tag: bytes | None = None, *, by_server: bool) -> modes.GCM:
    """Returns GCM with the nonce of a message: who sends it, and its number."""
    return modes.GCM(bytes([by_server, 0, 0, 0]) + number, tag)


def _authenticate(context: AEADCipherContext, payload: memoryview | None) -> None:
    """Covers a payload by the tag of its header."""
    if payload is not None:
        for start in range(0, payload.nbytes, _SLICE_BYTES):
            context.authenticate_additional_data(payload[start : start + _SLICE_BYTES])
