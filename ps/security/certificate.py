"""Self-signed certificates, which are pinned instead of being signed by an authority."""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from hubring.ps.config.address import address as split
from hubring.ps.core.errors import ConfigError, ServerUnreachable

NAME = "hubring"
"""The name in every certificate. Clients ask for it whatever the address is, since the digest is pinned."""

_YEARS = 10


class Identity(NamedTuple):
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the certificate, in hexadecimal."""
        return digest_of(self.certificate)


def make() -> Identity:
    """Returns a new certificate with a new private key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(certificate.public_bytes(serialization.Encoding.PEM), private)


def split_pem(pem: bytes) -> Identity:
    """Returns the certificate and the private key in a text that begins with the certificate."""
    end = b"-----END CERTIFICATE-----\n"
    before, found, after = pem.partition(end)
    return Identity(before + found, after)


def check_key(identity: Identity) -> None:
    """Checks that the private key is the certificate's, which is a valid one.

    Raises:
        ValueError: The key is damaged, or another certificate's.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        own = serialization.load_pem_private_key(identity.key, None).public_key()
    except (UnsupportedAlgorithm, TypeError) as error:
        raise ValueError(str(error)) from error
    if own != x509.load_pem_x509_certificate(identity.certificate).public_key():
        raise ValueError("the private key is not the certificate's")


def digest_of(pem: bytes) -> str:
    """Returns the SHA-256 of a certificate, in hexadecimal.

    Raises:
        ValueError: It is not a certificate.
    """
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def fetch(address: str, digest: str, seconds: float) -> bytes:
    """Returns the certificate, as PEM, of the server at an address.

    Raises:
        ServerUnreachable: No server answers there within `seconds`.
        ConfigError: The server has another certificate than the token says, or none.
    """
    try:
        found = _presented(address, seconds)
    except ssl.SSLError as error:
        raise ConfigError(
            f"the server at {address} does not use TLS, but the token is for one that does: it is another"
            " server's; copy the token file again"
        ) from error
    except OSError as error:
        raise ServerUnreachable(f"no server with TLS answers at {address} ({error})") from error
    if not hmac.compare_digest(hashlib.sha256(found).hexdigest(), digest):
        raise ConfigError(
            f"the server at {address} has another certificate than the token says: it is another server, or"
            " its tokens were made anew; copy its token file again"
        )
    return ssl.DER_cert_to_PEM_cert(found).encode()


def peek(address: str, seconds: float) -> bytes:
    """Returns the certificate that a server shows, as PEM, without knowing whose it is; empty without TLS."""
    try:
        return ssl.DER_cert_to_PEM_cert(_presented(address, seconds)).encode()
    except OSError:
        return b""


def _presented(address: str, seconds: float) -> bytes:
    host, port = split(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the caller compares
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), seconds) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True) or b""
