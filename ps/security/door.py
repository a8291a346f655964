"""What lets workers in to one shard. The coordinator passes it on to the workers that it has admitted."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from hubring.protos import control_pb2 as pb
from hubring.ps.security.access import Access
from hubring.ps.security.certificate import NAME, Identity, first, make
from hubring.ps.security.guard import Guard
from hubring.ps.security.policy import Role


@dataclass(frozen=True, slots=True)
class Door:
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
    name: str = NAME
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
    def from_proto(cls, message: pb.Door, identity: Identity | None = None) -> Door:
        """Returns the door of a message, for a program with this certificate of its own."""
        return cls(message.secret, message.certificate, message.curve, message.name or NAME, identity)

    def to_proto(self) -> pb.Door:
        """Returns the door as a message."""
        return pb.Door(secret=self.secret, certificate=self.certificate, curve=self.curve, name=self.name)

    def for_hub(self, token: str) -> Access:
        """Returns the access of the coordinator, which knows the shard's token."""
        return self.access._replace(secret=token)


OPEN = Door()


@dataclass(frozen=True, slots=True)
class Lock:
    """A shard's side of its door.

    Attributes:
        token: Names the shard to the coordinator, and lets the coordinator control it.
        secret: See `Door.secret`.
        identity: The shard's certificate; None for no TLS.
        authority: Certificates, as PEM, of who signs those of coordinator and workers; empty: they have none.
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
    def door(self) -> Door:
        """What the shard sends to its coordinator."""
        curve = self.curve[1] if self.curve else ""
        if self.identity is None:
            return Door(self.secret, curve=curve)
        return Door(self.secret, first(self.identity.certificate), curve, self.identity.name)


def lock(*, tls: bool, curve: bool, own: Identity | None = None, authority: bytes = b"") -> Lock:
    """Returns a new lock.

    Args:
        tls: Whether gRPC is encrypted, also without a certificate of its own.
        curve: Whether ZeroMQ is encrypted.
        own: The certificate that the shard's user brings; None for none.
        authority: See `Lock.authority`.
    """
    identity = own or (make() if tls else None)
    if not curve:
        return Lock(identity=identity, authority=authority)
    import zmq

    public, private = zmq.curve_keypair()
    return Lock(identity=identity, authority=authority, curve=(private.decode(), public.decode()))
