"""Certificates that the user brings: what is wrong with them is said before a connection is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.config.declaration import NO_FILES, TlsFiles
from hubring.ps.core.errors import ConfigError
from hubring.ps.security.certificate import (
    MAX_FILE_BYTES,
    NO_CERTIFICATE,
    Identity,
    first_certificate,
    load_certificate,
)
from tests.support.certificates import CONNECTS, SERVES, Authority


@pytest.fixture(name="ours")
def _ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def test_no_files_are_nothing() -> None:
    assert load_certificate(NO_FILES, serves=True) == NO_CERTIFICATE


@pytest.mark.parametrize("serves", [True, False])
def test_a_certificate_is_read_with_its_name_and_its_authority(ours: Authority, serves: bool) -> None:
    files = ours.sign("node1", "node1.example", "192.0.2.1")
    own = load_certificate(files, serves=serves)
    assert own.identity is not None
    assert own.identity.name == "node1.example"
    assert own.authority == ours.file.read_bytes()
    assert own.shown == own.identity
    alone = load_certificate(files._replace(ca=None), serves=serves)
    assert alone.identity == own.identity
    assert alone.shown is None


def test_a_chain_has_the_digest_of_its_first_certificate(ours: Authority) -> None:
    files = ours.sign("node1", "node1")
    assert files.cert is not None
    alone = files.cert.read_bytes()
    chain = b"text in front\n" + alone + ours.file.read_bytes()
    assert first_certificate(chain) == first_certificate(alone)
    assert Identity(chain, b"").digest == Identity(alone, b"").digest


def test_a_certificate_for_one_use_is_no_server_and_client(ours: Authority) -> None:
    of_server = ours.sign("server", "server", uses=[SERVES])
    of_client = ours.sign("client", uses=[CONNECTS])
    load_certificate(of_server._replace(ca=None), serves=True)
    load_certificate(of_client, serves=False)
    load_certificate(ours.sign("both", "both", uses=[SERVES, CONNECTS]), serves=True)
    for files in (of_server, of_client):
        with pytest.raises(ConfigError, match="purpose; a worker's certificate needs"):
            load_certificate(files, serves=True)


@pytest.mark.parametrize("serves", [True, False])
def test_an_invalid_certificate_is_refused_with_the_reason(
    tmp_path: Path, ours: Authority, serves: bool
) -> None:
    files, none = ours.sign("node1", "node1"), tmp_path / "none"
    other, expired = ours.sign("other", "node1"), ours.sign("expired", "node1", days=-1)
    secret, theirs = ours.sign("secret", "node1", password=b"secret"), Authority(tmp_path / "theirs").file
    large, binary = tmp_path / "large", tmp_path / "binary"
    large.write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    binary.write_bytes(b"\xff\xfe")
    renew = r"--tls-cert .*expired\.pem: certificate has expired; renew it"
    for given, message in (
        (files._replace(cert=None), r"--tls-key .*node1\.key needs --tls-cert FILE"),
        (files._replace(key=None), r"--tls-cert .*node1\.pem needs --tls-key FILE"),
        (files._replace(cert=none), r"cannot read --tls-cert .*none: No such file.*; check its path"),
        (files._replace(key=none), r"cannot read --tls-key .*none: No such file"),
        (files._replace(ca=none), r"cannot read --tls-ca .*none: No such file"),
        (
            files._replace(key=other.key),
            r"the key in --tls-key .*other\.key does not belong to the certificate in --tls-cert",
        ),
        (files._replace(cert=files.key), r"are not a certificate and its key"),
        (files._replace(ca=files.key), r"--tls-ca .*node1\.key has no certificate as PEM"),
        (files._replace(ca=binary), r"--tls-ca .*binary has no certificate as PEM"),
        (expired, renew),
        (expired._replace(ca=None), renew),
        (
            files._replace(ca=theirs),
            r"--tls-cert .*node1\.pem is not signed by the authority in --tls-ca .*theirs",
        ),
        (secret, r"the key in --tls-key is encrypted with a password"),
        (
            files._replace(ca=large),
            rf"--tls-ca .*large has {MAX_FILE_BYTES + 1} bytes; expected at most {MAX_FILE_BYTES}",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load_certificate(given, serves=serves)


def test_a_server_that_wants_certificates_needs_one(ours: Authority) -> None:
    with pytest.raises(ConfigError, match="so a server needs one too; add --tls-cert FILE --tls-key FILE"):
        load_certificate(TlsFiles(ca=ours.file), serves=True)
    assert load_certificate(TlsFiles(ca=ours.file), serves=False).authority
