"""The seal of ZeroMQ over TCP: it encrypts headers and payloads with AES-GCM (NIST SP 800-38D).

On loopback and with `--plain-data` it authenticates payloads, and encrypts only headers.

Law: an incarnation proves who sends, so no peer on the path may see one. Such a peer cannot change a message,
make one, or repeat one, not even in the other direction or on another connection. It can drop and delay
messages, as it can cut the connection: a worker sends again, and no request counts twice.

Each message has a key and a nonce of its own. They derive from the shard's secret, the lane's name, the
direction and the message's number, so they repeat only if all of these do. A restarted shard has a new
secret. Each lane of each connection has a new random name. A worker counts the messages of a lane. A shard
counts those of all lanes, as a stranger may take the name of a lane that ended. A forked process copies the
count but not ZeroMQ's threads, so it sends nothing. A number has 64 bits; no message follows the last one.
With one key for a whole connection, GCM would need another one after some 390 GB (RFC 8446, section 5.5).

One tag covers a message. ZeroMQ sends the parts of a message once it has the last one, so a tag for each part
would let nothing start earlier. What overlaps are messages: ZeroMQ's threads send one slice while the next is
encrypted. Since version 50, cryptography does not hold the GIL meanwhile.

A core encrypts 10.9 GB/s with a key of 128 bits, and 9.6 GB/s with 256 (100 MiB in slices of 4 MiB, the
fastest of 15 in turns). It authenticates 20 GB/s. 128 bits are enough: the nonce is secret too, so no guess
can be tested against many messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADCipherContext, Cipher, algorithms, modes

from hubring.ps.security.access import ShardKey
from hubring.ps.transport.base import DamagedHeader, Message
from hubring.ps.transport.mapping import unset_memory
from hubring.ps.transport.zmq.socket import MAX_EXTRA, PART_BYTES, Seal, joined

_NUMBER_BYTES = 8
_TAG_BYTES = MAX_EXTRA - _NUMBER_BYTES
_KEY_BYTES, _DRAWN_BYTES = 16, 16 + 12
"""Bytes of a message's key, and of key and nonce together."""


class KeyedSeal(Seal):
    """One end of a lane.

    Args:
        key: The shard's, which the members of its job know.
        lane: Names the lane; no other one of this shard has the name.
        numbers: Rising numbers for the messages that this end sends.
        serves: Whether this end is the shard's.
    """

    def __init__(self, key: ShardKey, lane: bytes, numbers: Iterator[int], *, serves: bool) -> None:
        kind = b"in clear" if key.plain_data else b"hub data"
        self._key = hashlib.blake2s(lane, key=key.data_key, person=kind).digest()
        self._plain = key.plain_data
        self._serves = serves
        self._numbers = numbers
        self._last = -1

    def seal(self, message: Message) -> tuple[bytes, memoryview | None]:
        number = next(self._numbers).to_bytes(_NUMBER_BYTES)
        context = self._cipher(number, by_shard=self._serves).encryptor()
        payload = self._cover(context, message.payload, here=False)
        return number + context.update(message.header) + context.finalize() + context.tag, payload

    def open(self, first: bytes, parts: list[memoryview]) -> Message:
        if len(first) < MAX_EXTRA:
            raise DamagedHeader(f"a first part of {len(first)} bytes is too short for a number and a tag")
        number, body, tag = first[:_NUMBER_BYTES], first[_NUMBER_BYTES:-_TAG_BYTES], first[-_TAG_BYTES:]
        context = self._cipher(number, tag, by_shard=not self._serves).decryptor()
        payload = self._cover(context, joined(parts), here=True)  # nothing else reads it
        try:
            header = context.update(body) + context.finalize()
        except InvalidTag as error:
            raise DamagedHeader(
                f"a message with a first part of {len(first)} bytes was changed, or made without the"
                " connection's key"
            ) from error
        count = int.from_bytes(number)
        if count <= self._last:
            raise DamagedHeader(f"message {count} came again, after message {self._last}")
        self._last = count
        return Message(header, payload)

    def _cipher(self, number: bytes, tag: bytes | None = None, *, by_shard: bool) -> Cipher[modes.GCM]:
        way = b"by shard" if by_shard else b"to shard"
        drawn = hashlib.blake2s(number, digest_size=_DRAWN_BYTES, key=self._key, person=way).digest()
        return Cipher(algorithms.AES128(drawn[:_KEY_BYTES]), modes.GCM(drawn[_KEY_BYTES:], tag))

    def _cover(
        self, context: AEADCipherContext, payload: memoryview | None, *, here: bool
    ) -> memoryview | None:
        """Covers a payload and its size by the tag. Returns the result, in the same memory if `here`."""
        # Without the size, bytes could move between header and payload, and an empty payload be left out.
        nbytes = -1 if payload is None else payload.nbytes
        context.authenticate_additional_data(nbytes.to_bytes(_NUMBER_BYTES, signed=True))
        if payload is None:
            return None
        passed = payload if here or self._plain else unset_memory(nbytes)
        for start in range(0, nbytes, PART_BYTES):
            part = payload[start : start + PART_BYTES]
            if self._plain:
                context.authenticate_additional_data(part)
            else:
                context.update_into(part, passed[start : start + PART_BYTES])
        return passed
