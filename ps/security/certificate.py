"""Certificates: those that a server makes and pins, those that secrets are, and those that the user brings.

A server's own are self-signed, and pinned instead of signed by an authority. A client shows a certificate too
(mutual TLS), so that gRPC reads no byte of a stranger's: the user's, which an authority signed, or else one
that is signed with the client's secret.
"""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from hubring.ps.config.declaration import NO_FILES, TlsFiles
from hubring.ps.core.errors import ConfigError
from hubring.ps.security import private_file

CERTIFICATE_NAME = "hubring"
"""The name in every certificate that a server makes. Clients ask for it whatever the address is."""

_VALID = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Always (RFC 5280, 4.1.2.5): clocks of hosts differ, and the key proves enough."""
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256 (FIPS 186-5). A private key is from 1 to one less."""
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
    name: str = CERTIFICATE_NAME

    def __repr__(self) -> str:
        return f"Identity(certificate={self.certificate!r})"  # without the key

    @property
    def digest(self) -> str:
        """SHA-256 of the certificate, the first if there are several, in hexadecimal.

        Raises:
            ValueError: It is not a certificate.
        """
        pem = first_certificate(self.certificate).decode()
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


def make_certificate() -> Identity:
    """Returns a new certificate with a new private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return _sign(ec.generate_private_key(ec.SECP256R1()), CERTIFICATE_NAME, CERTIFICATE_NAME)


@cache
def secret_authority(secret: str) -> bytes:
    """Returns the certificate of the authority whose private key a secret is, as PEM. It holds no secret."""
    return _sign(_key_of(secret), _name_of(secret), _name_of(secret), authority=True).certificate


@cache
def secret_certificate(secret: str) -> Identity:
    """Returns a certificate of the secret's authority, which proves that its holder knows the secret."""
    return _sign(_key_of(secret), CERTIFICATE_NAME, _name_of(secret))


def _key_of(secret: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    number = int.from_bytes(hashlib.blake2s(secret.encode(), person=b"tls key").digest())
    return ec.derive_private_key(number % (_CURVE_ORDER - 1) + 1, ec.SECP256R1())


def _name_of(secret: str) -> str:
    return hashlib.blake2s(secret.encode(), digest_size=16, person=b"tls name").hexdigest()


def _sign(key: Any, subject: str, issuer: str, *, authority: bool = False) -> Identity:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    since, until = _VALID
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
    )
    if authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
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


def first_certificate(pem: bytes) -> bytes:
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
    return [*alternatives, *common] or [CERTIFICATE_NAME]


log = logging.getLogger(__name__)

KEY_OPTION = "--tls-key"
MAX_FILE_BYTES = 64 << 10
"""Maximum size of a file: a shard process gets its content in a variable of its environment."""

_FLIGHTS = 3
"""How often each end of a handshake has to send."""


class OwnCertificate(NamedTuple):
    """What a program brings instead of what the server makes.

    Attributes:
        identity: Its certificate; None for none.
        authority: Certificates of the authority that signs its peers', as PEM; empty: the token proves them.
        files: Where both come from.
        subject: The certificate, as `ssl.SSLSocket.getpeercert` returns it; empty for none.
    """

    identity: Identity | None = None
    authority: bytes = b""
    files: TlsFiles = NO_FILES
    subject: Mapping[str, Any] = MappingProxyType({})

    @property
    def shown(self) -> Identity | None:
        """What a program shows where it is the client. Without an authority, its secret proves it."""
        return self.identity if self.authority else None


NO_CERTIFICATE = OwnCertificate()


def load_certificate(files: TlsFiles, *, serves: bool) -> OwnCertificate:
    """Reads a program's certificate and its authority, and tries whether they work together.

    Args:
        files: Their files.
        serves: Whether the program listens with the certificate. Any program may connect with it.

    Raises:
        ConfigError: A file cannot be read or used, the key belongs to another certificate, or the certificate
            has expired or was not signed by the authority.
    """
    files.check()
    if serves and files.ca is not None and files.cert is None:
        raise ConfigError(
            f"--tls-ca {files.ca} asks clients for a certificate of this authority, so a server needs one"
            " too; add --tls-cert FILE --tls-key FILE"
        )
    authority = b"" if files.ca is None else _read_file("--tls-ca", files.ca)
    if authority:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), authority, files)
    if files.cert is None or files.key is None:
        return OwnCertificate(None, authority, files)
    certificate, key = _read_file("--tls-cert", files.cert), _read_file(KEY_OPTION, files.key)
    subject = _rehearse(
        files, authority or first_certificate(certificate), serves=serves, connects=bool(authority)
    )
    return OwnCertificate(Identity(certificate, key, names_in(subject)[0]), authority, files, subject)


def show_identity(context: ssl.SSLContext, identity: Identity) -> None:
    """Makes connections with `context` show a certificate."""
    try:
        made: IO[bytes] = open(os.memfd_create("certificate"), "r+b", buffering=0)  # noqa: SIM115
    except OSError:  # as in a container that forbids it
        made = TemporaryFile(buffering=0)  # noqa: SIM115
    with made as file:  # ssl reads only files
        file.write(identity.certificate + identity.key)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


def present_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Makes connections with `context` show the certificate in `files`, if there is one. Raises as `load`."""
    if files.cert is None:
        return
    try:
        context.load_cert_chain(files.cert, files.key, _no_password)
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"the key in --tls-key {files.key} does not belong to the certificate in --tls-cert"
                f" {files.cert}; pass the key that the certificate was made for"
            ) from error
        raise ConfigError(
            f"--tls-cert {files.cert} and --tls-key {files.key} are not a certificate and its key ({error});"
            " expected PEM files"
        ) from error


def _no_password() -> str:
    raise ConfigError(
        "the key in --tls-key is encrypted with a password, which a program without a terminal cannot ask"
        " for; decrypt it: openssl pkey -in KEY -out NEW"
    )


def _rehearse(files: TlsFiles, roots: bytes, *, serves: bool, connects: bool) -> Mapping[str, Any]:
    """Runs a handshake of the certificate with itself, and returns its subject, as `getpeercert` does."""
    server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    client.check_hostname = False
    for context in (server, client):
        present_certificate(context, files)
        _trust(context, roots, files)
        context.verify_mode = ssl.CERT_NONE
    client.verify_mode = ssl.CERT_REQUIRED if serves else ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED if connects or not serves else ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    try:
        for _ in range(_FLIGHTS):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(_unfit(files, error)) from error
    return next((subject for end in ends if (subject := end.getpeercert())), {})


def _unfit(files: TlsFiles, error: ssl.SSLCertVerificationError) -> str:
    why = error.verify_message
    if "expired" in why or "not yet valid" in why:
        return f"--tls-cert {files.cert}: {why}; renew it, and check this host's clock"
    if "purpose" in why:
        return (
            f"--tls-cert {files.cert}: {why}; a worker's certificate needs the extended key usage clientAuth,"
            " and that of a host with shards also serverAuth"
        )
    return (
        f"--tls-cert {files.cert} is not signed by the authority in --tls-ca {files.ca} ({why}); use"
        " certificates of one authority, and put those between both into --tls-cert"
    )


def _read_file(flag: str, file: Path) -> bytes:
    try:
        with private_file.opened(file) as descriptor:
            if flag == KEY_OPTION:
                _check_key_mode(file, descriptor)
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                text = stream.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read {flag} {file}: {error.strerror}; check its path and its mode"
        ) from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{flag} {file} has {len(text)} bytes; expected at most {MAX_FILE_BYTES}: certificates of the"
            " job's own authority, not a system's collection"
        )
    return text


def _check_key_mode(file: Path, descriptor: int) -> None:
    """Warns of a private key that other users know.

    It is not refused: a volume of Kubernetes gives its files modes that suit the pod, not a host. A group may
    read it, as the group `ssl-cert` of Debian does.
    """
    status = os.fstat(descriptor)
    if private_file.is_mounted(descriptor):
        return
    if status.st_mode & stat.S_IRWXO:
        _warn(
            f"all users of this host can read the private key in {KEY_OPTION} {file}; run: chmod 600 {file}"
        )
    elif status.st_uid not in (os.getuid(), 0):
        _warn(
            f"the private key in {KEY_OPTION} {file} belongs to another user, uid {status.st_uid}, who knows"
            " it and can change it; use a key that only you or root own"
        )


@cache
def _warn(text: str) -> None:
    """Logs a text once: a program may read its key for several purposes."""
    log.warning("%s", text)


def _trust(context: ssl.SSLContext, roots: bytes, files: TlsFiles) -> None:
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: a root need not be self-signed
    try:
        context.load_verify_locations(cadata=roots.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{f'--tls-ca {files.ca}' if files.ca else f'--tls-cert {files.cert}'} has no certificate as PEM"
            f" ({error}); expected -----BEGIN CERTIFICATE-----"
        ) from error
