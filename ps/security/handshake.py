"""A client's first handshake with a server, before it sends a secret.

Law: it returns only what the server proved. A server is proved by the digest in a token, or by an authority
that signed its certificate for the host in its address. What may be a damaged packet or a server in its first
or last moment is tried again.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from hubring.ps.config.values import address as split
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.security.certificate import (
    CERTIFICATE_NAME,
    NO_CERTIFICATE,
    OwnCertificate,
    names_in,
    secret_certificate,
    show_identity,
)

SURE_SECONDS = 0.5
"""For how long a server has to answer alike before a client believes that it uses no TLS, or refuses it."""

STALLED_SECONDS = 2.0
"""A server that ends a handshake later than this has not refused it: it was too busy within gRPC's limit."""

ANSWER_SECONDS = 5.0
"""Seconds for which a server that listens may take for its handshakes, at least."""

_PAUSE_SECONDS = 0.1
_BY_AUTHORITY = ", or pass --tls-ca, if the server has a certificate of your authority"


class ServerCertificate(NamedTuple):
    """A server's certificate.

    Attributes:
        certificate: As PEM; empty without TLS.
        name: A name in it.
    """

    certificate: bytes = b""
    name: str = CERTIFICATE_NAME


class Proof(NamedTuple):
    """What a client asks of a server.

    Attributes:
        digest: SHA-256 of the certificate, in hexadecimal; empty for any.
        own: What the client brings. If it has an authority, that signed the certificate.
        named: Whether the certificate is for the host in the address.
        secret: Proves a client without an authority.
    """

    digest: str = ""
    own: OwnCertificate = NO_CERTIFICATE
    named: bool = False
    secret: str = ""


def fetch(address: str, proof: Proof, seconds: float) -> ServerCertificate:
    """Returns the certificate of the server at an address, which is the one that the client means.

    Raises:
        ServerUnreachable: No server answers there within `seconds`.
        ConfigError: The server has another certificate than it should, or none, or refuses the client's.
    """
    deadline = time.monotonic() + seconds
    refused_since = math.inf
    while True:
        try:
            return _prove(address, proof, max(_PAUSE_SECONDS, deadline - time.monotonic()))
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(_distrust(address, proof, error)) from error
        except OSError as error:
            now = time.monotonic()
            refused_since = min(refused_since, now) if _answers(error) else math.inf
            if now - refused_since > SURE_SECONDS:
                raise ConfigError(_refusal(address, proof, error)) from error
            if now > deadline:
                raise ServerUnreachable(f"no server with TLS answers at {address} ({error})") from error
        time.sleep(_PAUSE_SECONDS)


def uses_tls(address: str, seconds: float) -> bool:
    """Whether a server uses TLS. One in its first or last moment may not answer at once.

    Args:
        address: The server's `HOST:PORT`.
        seconds: How long to ask a server that does not answer.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return bool(_shown(address, ANSWER_SECONDS))
        except OSError as error:
            if _answers(error) or time.monotonic() > deadline:
                return False
        time.sleep(_PAUSE_SECONDS)


class _Closed(ConnectionError):
    """The server closed the connection after the handshake."""


def _answers(error: OSError) -> bool:
    """Whether the server answered with something else than a handshake, or closed after one."""
    ended = isinstance(error, ssl.SSLEOFError)  # as a server does that has too many connections, or ends
    return isinstance(error, ssl.SSLError | _Closed) and not ended


def _prove(address: str, proof: Proof, seconds: float) -> ServerCertificate:
    authority = proof.own.authority.decode()
    if not authority:
        found = _shown(address, seconds)
        _compare(address, proof, found)
        authority = ssl.DER_cert_to_PEM_cert(found)
    context = _trusting(authority)
    context.check_hostname = proof.named
    show_identity(context, proof.own.shown or secret_certificate(proof.secret))
    host = split(address)[0] if proof.named else None
    subject, found = _shake(address, context, host, seconds, waits=True)
    _compare(address, proof, found)
    return ServerCertificate(ssl.DER_cert_to_PEM_cert(found).encode(), host or names_in(subject)[0])


def _compare(address: str, proof: Proof, found: bytes) -> None:
    if proof.digest and not hmac.compare_digest(hashlib.sha256(found).hexdigest(), proof.digest):
        or_by_authority = "" if proof.own.authority else _BY_AUTHORITY
        raise ConfigError(
            f"certificate mismatch at {address}: this token belongs to another server, or the tokens were"
            f" regenerated; copy the server's token file again{or_by_authority}"
        )


def _shown(address: str, seconds: float) -> bytes:
    context = _context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the caller compares
    return _shake(address, context, None, seconds)[1]


def _trusting(roots: str) -> ssl.SSLContext:
    context = _context()
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: a root need not be self-signed
    context.load_verify_locations(cadata=roots)
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


def _shake(
    address: str, context: ssl.SSLContext, host: str | None, seconds: float, *, waits: bool = False
) -> tuple[Mapping[str, Any], bytes]:
    """Returns the server's certificate, parsed if it was verified, and as DER.

    Args:
        address: The server's `HOST:PORT`.
        context: How to verify it.
        host: The name to ask for; None for any.
        seconds: Time limit of each read.
        waits: Whether to wait for the server's first bytes, which show that it lets this client in.
    """
    began = time.monotonic()
    with (
        socket.create_connection(split(address), seconds) as plain,
        context.wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        if waits and not encrypted.recv(1):
            stalled = time.monotonic() - began > STALLED_SECONDS
            raise (TimeoutError if stalled else _Closed)("the server closed the connection")
        return encrypted.getpeercert() or {}, encrypted.getpeercert(binary_form=True) or b""


def _distrust(address: str, proof: Proof, error: ssl.SSLCertVerificationError) -> str:
    why = error.verify_message.rstrip(".")
    if "expired" in why or "not yet valid" in why:
        return f"the server at {address}: {why}; renew it, restart the server, and check this host's clock"
    if "mismatch" in why:
        return (
            f"the server at {address}: {why}; use a name in its certificate as the address, or a certificate"
            " that has this one in its subjectAltName"
        )
    return (
        f"the certificate of the server at {address} is not signed by the authority in --tls-ca"
        f" {proof.own.files.ca} ({why}); if the server makes its own certificate, remove --tls-ca"
    )


def _refusal(address: str, proof: Proof, error: OSError) -> str:
    if not isinstance(error, _Closed):
        return (
            f"the server at {address} does not use TLS, but the token is for one that does: it is another"
            " server's; copy the token file again"
        )
    if proof.own.shown is None:
        return (
            f"the server at {address} closes the connection of this program: it does not know the token, or"
            " wants a certificate of its authority; copy the server's token file again, or pass --tls-cert,"
            " --tls-key and --tls-ca"
        )
    return (
        f"the server at {address} closes the connection of the program with --tls-cert"
        f" {proof.own.files.cert}: the authority in --tls-ca of the server did not sign that certificate, it"
        " has expired, or the server has no authority; pass a certificate of that authority, or none"
    )
