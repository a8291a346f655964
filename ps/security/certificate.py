"""Certificates, and those that a server makes: self-signed, and pinned instead of signed by an authority."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

NAME = "hubring"
"""The name in every certificate that a server makes. Clients ask for it whatever the address is."""

_YEARS = 10
_HOSTS = {"DNS", "IP Address"}


class Identity(NamedTuple):
    """A certificate and its private key.

    Attributes:
        certificate: As PEM; those of authorities between it and the root may follow.
        key: As PEM.
        name: A name in the certificate.
    """

    certificate: bytes
    key: bytes
    name: str = NAME

    def __repr__(self) -> str:
        return f"Identity(certificate={self.certificate!r})"  # without the key

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
        certified = x509.load_pem_x509_certificate(identity.certificate).public_key()
    except (UnsupportedAlgorithm, x509.InvalidVersion, TypeError) as error:
        raise ValueError(str(error)) from error
    if own != certified:
        raise ValueError("the private key is not the certificate's")


def digest_of(pem: bytes) -> str:
    """Returns the SHA-256 of a certificate, the first if there are several, in hexadecimal.

    Raises:
        ValueError: It is not a certificate.
    """
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first(pem).decode())).hexdigest()


def first(pem: bytes) -> bytes:
    """Returns the first of some certificates, as PEM, without text in front of it."""
    end = ssl.PEM_FOOTER.encode()
    before, found, _ = pem.partition(end)
    return before[max(0, before.find(ssl.PEM_HEADER.encode())) :] + found + b"\n"


def names_in(subject: Mapping[str, Any]) -> list[str]:
    """Returns the host names and addresses that a certificate is for; the first can be asked for.

    Args:
        subject: The certificate, as `ssl.SSLSocket.getpeercert` returns it.
    """
    alternatives = [value for kind, value in subject.get("subjectAltName", ()) if kind in _HOSTS]
    common = [value for part in subject.get("subject", ()) for key, value in part if key == "commonName"]
    return [*alternatives, *common] or [NAME]
