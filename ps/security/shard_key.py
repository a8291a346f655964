"""What lets workers in to one shard. The coordinator passes it on to the workers that it has admitted."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from hubring.protos import control_pb2 as pb
from hubring.ps.security.access import Access
from hubring.ps.security.certificate import CERTIFICATE_NAME, Identity, first_certificate, make_certificate
from hubring.ps.security.guard import Guard, Role


@dataclass(frozen=True, slots=True)
class ShardKey:
    """A worker's key to a shard.

    Attributes:
        secret: Opens the data stream of gRPC; empty: it is open.
        certificate: The shard's, as PEM; empty for no TLS.
        curve: Public key of ZeroMQ's CURVE in Z85; empty for no encryption.
        name: A name in the certificate.
        identity: What the worker shows to the shard; None for no certificate.
    """

    secret: str = field(default="", repr=False)
    certificate: bytes = b""
    curve: str = ""
    name: str = CERTIFICATE_NAME
    identity: Identity | None = None

    def password(self, nonce: bytes) -> bytes:
        """Returns what a worker shows to ZeroMQ without CURVE, once: sniffers see it. It tells no secret.

        Args:
            nonce: Random bytes, which the worker shows too.
        """
        key = hashlib.blake2s(self.secret.encode(), person=b"password").digest()
        return hashlib.blake2s(nonce, key=key).hexdigest().encode()

    @property
    def data_key(self) -> bytes:
        """What ZeroMQ's messages are sealed with if TLS protects the rest, but no CURVE; empty for no key."""
        return bytes.fromhex(self.secret) if self.certificate and not self.curve else b""

    @property
    def access(self) -> Access:
        """The access of a worker."""
        return Access(self.secret, self.certificate, self.name, self.identity)

    @classmethod
    def from_proto(cls, message: pb.Door, identity: Identity | None = None) -> ShardKey:
        """Returns the key of a message, for a program with this certificate of its own."""
        return cls(
            message.secret, message.certificate, message.curve, message.name or CERTIFICATE_NAME, identity
        )

    def to_proto(self) -> pb.Door:
        """Returns the key as a message."""
        return pb.Door(secret=self.secret, certificate=self.certificate, curve=self.curve, name=self.name)

    def for_hub(self, token: str) -> Access:
        """Returns the access of the coordinator, which knows the shard's token."""
        return self.access._replace(secret=token)


NO_KEY_NEEDED = ShardKey()


@dataclass(frozen=True, slots=True)
class ShardLock:
    """A shard's side of its key.

    Attributes:
        token: Names the shard to the coordinator, and lets the coordinator control it.
        secret: See `ShardKey.secret`.
        identity: The shard's certificate; None for no TLS.
        authority: PEM certificates of the authority of coordinator and workers; empty: they have none.
        curve: Secret and public key of CURVE in Z85; None for no encryption.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    identity: Identity | None = None
    authority: bytes = b""
    curve: tuple[str, str] | None = field(default=None, repr=False)

    @property
    def guard(self) -> Guard:
        """Checks the calls of the shard's gRPC server."""
        return Guard({Role.HUB: self.token, Role.MEMBER: self.secret})

    @property
    def key(self) -> ShardKey:
        """What the shard sends to its coordinator."""
        curve = self.curve[1] if self.curve else ""
        if self.identity is None:
            return ShardKey(self.secret, curve=curve)
        return ShardKey(self.secret, first_certificate(self.identity.certificate), curve, self.identity.name)


def make_lock(*, tls: bool, curve: bool, own: Identity | None = None, authority: bytes = b"") -> ShardLock:
    """Returns a new lock.

    Args:
        tls: Whether gRPC is encrypted, also without a certificate of its own.
        curve: Whether ZeroMQ is encrypted.
        own: The certificate that the shard's user brings; None for none.
        authority: See `ShardLock.authority`.
    """
    identity = own or (make_certificate() if tls else None)
    if not curve:
        return ShardLock(identity=identity, authority=authority)
    import zmq

    public, private = zmq.curve_keypair()
    return ShardLock(identity=identity, authority=authority, curve=(private.decode(), public.decode()))
