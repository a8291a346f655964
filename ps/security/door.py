"""What lets workers in to one shard. The coordinator passes it on to the workers that it has admitted."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from hubring.protos import control_pb2 as pb
from hubring.ps.security.access import Access
from hubring.ps.security.certificate import Identity, make
from hubring.ps.security.guard import Guard
from hubring.ps.security.policy import Role


@dataclass(frozen=True, slots=True)
class Door:
    """A worker's key to a shard.

    Attributes:
        secret: Opens the data stream of gRPC; empty: it is open.
        certificate: The shard's, as PEM; empty for no TLS.
        curve: Public key of ZeroMQ's CURVE in Z85; empty for no encryption.
    """

    secret: str = ""
    certificate: bytes = b""
    curve: str = ""

    @property
    def access(self) -> Access:
        """The access of a worker."""
        return Access(self.secret, self.certificate)

    @classmethod
    def from_proto(cls, message: pb.Door) -> Door:
        """Returns the door of a message."""
        return cls(message.secret, message.certificate, message.curve)

    def to_proto(self) -> pb.Door:
        """Returns the door as a message."""
        return pb.Door(secret=self.secret, certificate=self.certificate, curve=self.curve)

    def for_hub(self, token: str) -> Access:
        """Returns the access of the coordinator, which knows the shard's token."""
        return Access(token, self.certificate)


OPEN = Door()


@dataclass(frozen=True, slots=True)
class Lock:
    """A shard's side of its door.

    Attributes:
        token: Names the shard to the coordinator, and lets the coordinator control it.
        secret: See `Door.secret`.
        identity: The shard's certificate; None for no TLS.
        curve: Secret and public key of CURVE in Z85; None for no encryption.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(32))
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    identity: Identity | None = None
    curve: tuple[str, str] | None = None

    @property
    def guard(self) -> Guard:
        """Checks the calls of the shard's gRPC server."""
        return Guard({Role.HUB: self.token, Role.MEMBER: self.secret})

    @property
    def door(self) -> Door:
        """What the shard tells its coordinator."""
        certificate = self.identity.certificate if self.identity else b""
        return Door(self.secret, certificate, self.curve[1] if self.curve else "")


def lock(*, tls: bool, curve: bool) -> Lock:
    """Returns a new lock.

    Args:
        tls: Whether gRPC is encrypted.
        curve: Whether ZeroMQ is encrypted.
    """
    if not curve:
        return Lock(identity=make() if tls else None)
    import zmq

    public, private = zmq.curve_keypair()
    return Lock(identity=make() if tls else None, curve=(private.decode(), public.decode()))
