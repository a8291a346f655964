"""What lets a client in: a secret, and the certificate to expect; and a shard's side of it.

A worker needs another secret for each shard. The coordinator passes it on to the workers that it has
admitted.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hubring.protos import control_pb2 as pb
from hubring.ps.config.values import address as split
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.security import private_file
from hubring.ps.security import token_file as files
from hubring.ps.security.certificate import (
    CERTIFICATE_NAME,
    NO_CERTIFICATE,
    Identity,
    OwnCertificate,
    first_certificate,
)
from hubring.ps.security.guard import Guard, Role
from hubring.ps.security.handshake import ANSWER_SECONDS, Proof, fetch, uses_tls
from hubring.ps.security.token_file import Token, Tokens, choose_token

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""Seconds for which a program looks for its server: launchers start server, shards and workers together."""

LOOK_SECONDS = 0.1
"""Seconds between two looks, and for one look at a server that is expected to run."""


class Access(NamedTuple):
    """What a channel is opened with.

    Attributes:
        secret: Sent with every call; empty for none.
        certificate: The server's, as PEM; empty for no TLS.
        name: A name in that certificate.
        identity: What the client shows; None: what its secret signs.
        unix: Path of the server's unix socket, which proves it; empty for TCP.
    """

    secret: str = ""
    certificate: bytes = b""
    name: str = CERTIFICATE_NAME
    identity: Identity | None = None
    unix: str = ""

    def __repr__(self) -> str:
        return f"Access(certificate={self.certificate!r}, unix={self.unix!r})"  # without the secret


NO_ACCESS = Access()


def find_access(
    address: str,
    role: Role,
    file: Path | None,
    seconds: float,
    own: OwnCertificate = NO_CERTIFICATE,
    *,
    insecure: bool = False,
    busy_seconds: float = 0.0,
) -> Access:
    """Returns the access of this user to a server that has proved itself.

    It waits up to `seconds` for the server to listen, and for its token file: both may be starting. It tries
    again for `busy_seconds` if a server listens and does not shake hands, as one that is busy or paused.

    Args:
        address: The server's `HOST:PORT`.
        role: What the caller wants to do.
        file: A file with tokens; None for that of this user's server on this host and port, if there is one.
        seconds: How long to wait.
        own: The caller's certificate, and the authority of the server's.
        insecure: Whether to trust a server that proves nothing, and encrypts nothing.
        busy_seconds: See above.

    Raises:
        ConfigError: There is no token for this role, or the file belongs to another server.
        ServerUnreachable: No server answers with TLS.
    """
    if insecure and file is not None:
        raise ConfigError(
            f"--token-file {file} is for a server that asks for tokens, and --insecure for one that asks for"
            " none; remove one of the two"
        )
    deadline = time.monotonic() + seconds
    listens = _await_listener(address, deadline)
    if insecure:
        return _without_proof(address, listens=listens)
    if file is not None and not listens and _may_come(file):  # a server that ended has deleted it
        raise ServerUnreachable(f"no server listens at {address}, and there is no {file}")
    tokens = _read(file, deadline) if file is not None else _of_this_user(address)
    if not tokens:
        if listens and uses_tls(address, deadline - time.monotonic()):
            raise refused_error(address, "it has no token")
        raise ServerUnreachable(f"no server with TLS answers at {address}")
    token = _chosen(tokens, role, file)
    if file is None and (unix := unix_socket(address)):
        return Access(token.secret, unix=unix)
    if not listens:  # not NO_ACCESS: whatever comes to listen there later must prove itself
        raise ServerUnreachable(f"no server listens at {address}")
    # A copied token may be older than the certificate that an authority signed.
    by_authority = bool(own.authority) and file is not None
    proof = Proof("" if by_authority else token.digest, own, by_authority, token.secret)
    while True:
        try:
            peer = fetch(address, proof, max(ANSWER_SECONDS, deadline - time.monotonic()))
        except ServerUnreachable as error:
            if not isinstance(error.__cause__, TimeoutError) or time.monotonic() > deadline + busy_seconds:
                raise
            log.warning("%s; a process listens there, so this program tries again", error)
        else:
            return Access(token.secret, peer.certificate, peer.name, own.shown)


def _without_proof(address: str, *, listens: bool) -> Access:
    if not listens:
        raise ServerUnreachable(f"no server listens at {address}")
    if uses_tls(address, 0.0):
        raise ConfigError(f"the server at {address} asks for tokens and encrypts; remove --insecure")
    return NO_ACCESS


def check_token_file(file: Path | None, role: Role) -> None:
    """Checks a token file before a program does what takes long. A later program may still write it.

    Raises:
        ConfigError: The file cannot be used, or has no token for this role.
    """
    if file is not None and not _may_come(file):
        _chosen(files.read_tokens(file), role, file)


def _may_come(file: Path) -> bool:
    """Whether a file does not exist, but can be written at any time."""
    return not private_file.exists(file, files.FILE_OPTION) and private_file.exists(
        file.parent, files.FILE_OPTION
    )


def _chosen(tokens: Tokens, role: Role, file: Path | None) -> Token:
    token = choose_token(tokens, role)
    if token is None:
        raise ConfigError(
            f"the tokens in {file or 'the runtime directory'} are for {', '.join(tokens)}, but this program"
            f" needs one for {role}; on the server's host, run: ps-server token show --token-file FILE --role"
            f" {role}, with the FILE in the server's banner"
        )
    return token


def look_seconds(address: str) -> float:
    """Returns how long to look for a server that is expected to run; another host may be far away."""
    return LOOK_SECONDS if is_this_host(split(address)[0]) else CONNECT_SECONDS


def refused_error(address: str, why: str) -> ConfigError:
    """Returns the error of a client that a server does not let in."""
    return ConfigError(
        f"the server at {address} refused this program: {why}; copy the server's token file, which its banner"
        " names, to this host, and pass it with --token-file or PS_TOKEN_FILE"
    )


def _read(file: Path, deadline: float) -> Tokens:
    logged = False
    while _may_come(file) and (left := deadline - time.monotonic()) > 0:
        if not logged and left > LOOK_SECONDS:
            log.warning("waiting up to %.0f s for %s, the file with the server's token", left, file)
        logged = True
        time.sleep(min(left, LOOK_SECONDS))
    return files.read_tokens(file)


def unix_socket(address: str) -> str:
    """Returns the path of the unix socket of this user's server at an address; empty if none answers."""
    host, port = split(address)
    path = files.find_control_socket(port)
    if not path or not is_this_host(host):
        return ""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)  # a stopped server may have no room
        return "" if trial.connect_ex(path) else path


def _of_this_user(address: str) -> Tokens:
    host, port = split(address)
    file = files.find_runtime_file(port)
    return files.read_tokens(file) if file is not None and is_this_host(host) else {}


def is_this_host(host: str) -> bool:
    """Whether an address is one of this host's: a secret of a server here must not be sent elsewhere."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_listen(family, place) for family, _, _, _, place in found)


def _can_listen(family: int, place: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(place)
        except OSError:
            return False
    return True


def _await_listener(address: str, deadline: float) -> bool:
    place, logged = split(address), False
    while True:
        if unix_socket(address):
            return True
        try:
            socket.create_connection(place, max(LOOK_SECONDS, deadline - time.monotonic())).close()
        except OSError:
            left = deadline - time.monotonic()
            if left < 0:
                return False
            if not logged:
                log.info("no server at %s yet; retrying for %.0f s", address, left)
            logged = True
            time.sleep(LOOK_SECONDS)
        else:
            return True


@dataclass(frozen=True, slots=True)
class ShardKey:
    """A worker's key to a shard.

    Attributes:
        access: Opens the data stream of gRPC; without a secret, it is open.
        plain_data: Whether ZeroMQ's payloads are authenticated, but not encrypted.
    """

    access: Access = NO_ACCESS
    plain_data: bool = False

    def password(self, nonce: bytes) -> bytes:
        """Returns what a worker shows to ZeroMQ, once: sniffers see it. It tells no secret.

        Args:
            nonce: Random bytes, which the worker shows too.
        """
        key = hashlib.blake2s(self.access.secret.encode(), person=b"password").digest()
        return hashlib.blake2s(nonce, key=key).hexdigest().encode()

    @property
    def near(self) -> ShardKey:
        """The key to the shard's unix sockets, which prove it. No other user sees their bytes."""
        return ShardKey(Access(self.access.secret))

    @property
    def data_key(self) -> bytes:
        """What ZeroMQ's messages are sealed with if TLS protects the rest; empty for no key."""
        return bytes.fromhex(self.access.secret) if self.access.certificate else b""

    @classmethod
    def from_proto(cls, message: pb.Door, identity: Identity | None = None) -> ShardKey:
        """Returns the key of a message, for a program with this certificate of its own."""
        name = message.name or CERTIFICATE_NAME
        return cls(Access(message.secret, message.certificate, name, identity), message.plain_data)

    def to_proto(self) -> pb.Door:
        """Returns the key as a message."""
        there = self.access
        return pb.Door(
            secret=there.secret, certificate=there.certificate, name=there.name, plain_data=self.plain_data
        )


NO_KEY_NEEDED = ShardKey()


@dataclass(frozen=True, slots=True)
class ShardLock:
    """A shard's side of its key.

    Attributes:
        token: Names the shard to the coordinator, and lets the coordinator control it.
        secret: Opens the data stream of gRPC to a worker.
        identity: The shard's certificate; None for no TLS.
        authority: PEM certificates of the authority of coordinator and workers; empty: they have none.
        plain_data: See `ShardKey`.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    identity: Identity | None = None
    authority: bytes = b""
    plain_data: bool = False

    @property
    def guard(self) -> Guard:
        """Checks the calls of the shard's gRPC server."""
        return Guard({Role.HUB: self.token, Role.MEMBER: self.secret})

    @property
    def key(self) -> ShardKey:
        """What the shard sends to its coordinator."""
        access = Access(self.secret)
        if self.identity is not None:
            certificate = first_certificate(self.identity.certificate)
            access = Access(self.secret, certificate, self.identity.name)
        return ShardKey(access, self.plain_data)
