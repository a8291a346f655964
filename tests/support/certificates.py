"""Authorities and the certificates that they sign, as PEM files."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hubring.ps.config.declaration import TlsFiles
from hubring.ps.security.access import Access

SERVES, CONNECTS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


def stranger_access(address: str, seconds: float, secret: str = "") -> Access:
    """Returns the access of a stranger, who trusts whatever certificate the server shows. Raises OSError."""
    host, _, port = address.rpartition(":")
    return Access(secret, ssl.get_server_certificate((host, int(port)), timeout=seconds).encode())


class Authority:
    """An authority with a folder for its files.

    Args:
        folder: An empty folder; made if it does not exist.
        parent: The authority that signs this one, which then is an intermediate; None for a root.

    Attributes:
        file: The authority's own certificate.
    """

    def __init__(self, folder: Path, parent: Authority | None = None) -> None:
        folder.mkdir(exist_ok=True)
        issuer = parent or self
        self._root = issuer
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"authority {folder.name}")
        public = self._key.public_key()
        builder = _builder(self._name, issuer._name, public, days=10)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        self.file = folder / "ca.pem"
        self.file.write_bytes(_pem(builder.sign(issuer._key, hashes.SHA256())))

    def sign(
        self,
        name: str,
        *hosts: str,
        days: int = 10,
        uses: Sequence[x509.ObjectIdentifier] = (),
        password: bytes = b"",
    ) -> TlsFiles:
        """Writes a certificate and its key, and returns their files with that of the authority.

        Args:
            name: Stem of the files.
            *hosts: Names and IP addresses in the certificate.
            days: When it expires; negative: it has expired.
            uses: What it may be used for; empty: anything.
            password: Encrypts the key; empty: it is not encrypted.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._name, key.public_key(), days)
        if hosts:
            names = [_host(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        files = TlsFiles(self._folder / f"{name}.pem", self._folder / f"{name}.key", self._root.file)
        assert files.cert is not None
        assert files.key is not None
        chain = b"" if self._root is self else self.file.read_bytes()
        files.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())) + chain)
        encryption = (
            serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        )
        form = serialization.PrivateFormat.PKCS8
        files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
        files.key.chmod(0o600)
        return files


def flags(files: TlsFiles) -> list[str]:
    """The files as flags of a program."""
    return [word for name, file in files._asdict().items() if file for word in (f"--tls-{name}", str(file))]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(days=100),
        not_valid_after=now + timedelta(days=days),
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
