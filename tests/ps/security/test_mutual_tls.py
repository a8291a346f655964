"""A client with an authority: which servers it talks to, and which servers talk to it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from hubring.ps.config.declaration import TlsFiles
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.security import handshake, token_file
from hubring.ps.security.access import find_access
from hubring.ps.security.certificate import NO_CERTIFICATE, OwnCertificate, load_certificate, make_certificate
from hubring.ps.security.guard import Role
from hubring.ps.security.handshake import Proof, fetch
from hubring.ps.security.token_file import draw_tokens
from tests.ps.security import health_server
from tests.ps.security.health_server import SECONDS
from tests.support.certificates import Authority

HERE = "127.0.0.1"


def serving(own: OwnCertificate, tokens: Path | None = None) -> AbstractContextManager[str]:
    known = [token.secret for token in token_file.read_tokens(tokens).values()] if tokens else [""]
    return health_server.serving(own.identity or make_certificate(), own.authority, known)


@pytest.fixture(name="ours")
def _ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(handshake, "SURE_SECONDS", 0.0)
    return Authority(tmp_path / "ours")


@pytest.fixture(name="tokens")
def _tokens(tmp_path: Path) -> Path:
    """Tokens of a certificate that the server no longer has."""
    token_file.write_tokens(tmp_path / "tokens", draw_tokens(make_certificate().digest))
    return tmp_path / "tokens"


def client(files: TlsFiles) -> OwnCertificate:
    return load_certificate(files, serves=False)


def asks(address: str, tokens: Path, own: OwnCertificate) -> int:
    access = find_access(address, Role.WORKER, tokens, SECONDS, own)
    assert access.secret == token_file.read_tokens(tokens)[Role.WORKER].secret
    return health_server.asks(address, access)


@pytest.mark.parametrize("host", [HERE, "localhost"])
def test_both_ends_show_certificates_of_one_authority(ours: Authority, tokens: Path, host: str) -> None:
    with serving(load_certificate(ours.sign("server", "localhost", HERE), serves=True)) as address:
        there = address.replace(HERE, host)
        assert asks(there, tokens, client(ours.sign("client"))) == health_pb2.HealthCheckResponse.SERVING


def test_an_intermediate_follows_the_certificate_that_it_signed(
    ours: Authority, tokens: Path, tmp_path: Path
) -> None:
    between = Authority(tmp_path / "between", ours)
    files = between.sign("server", HERE)
    assert files.ca == ours.file
    with serving(load_certificate(files, serves=True)) as address:
        found = asks(address, tokens, client(between.sign("client")))
        assert found == health_pb2.HealthCheckResponse.SERVING


def test_a_server_may_want_no_certificate(ours: Authority, tokens: Path) -> None:
    own = load_certificate(ours.sign("server", HERE)._replace(ca=None), serves=True)
    with serving(own, tokens) as address:
        found = asks(address, tokens, client(TlsFiles(ca=ours.file)))
        assert found == health_pb2.HealthCheckResponse.SERVING


def test_without_an_authority_the_token_proves_an_own_certificate(ours: Authority, tmp_path: Path) -> None:
    own = load_certificate(ours.sign("server", "server.example")._replace(ca=None), serves=True)
    assert own.identity is not None
    token_file.write_tokens(tmp_path / "pinned", draw_tokens(own.identity.digest))
    with serving(own, tmp_path / "pinned") as address:
        files = ours.sign("client")._replace(ca=None)
        assert asks(address, tmp_path / "pinned", client(files)) == health_pb2.HealthCheckResponse.SERVING


def test_tokens_of_this_users_server_need_no_name(ours: Authority, tmp_path: Path) -> None:
    own = load_certificate(ours.sign("server", "server.example"), serves=True)
    assert own.identity is not None
    with serving(own) as address:
        file = token_file.runtime_file(int(address.rpartition(":")[2]))
        token_file.write_tokens(file, draw_tokens(own.identity.digest))
        access = find_access(address, Role.WORKER, None, SECONDS, client(ours.sign("client")))
        assert access.name == "server.example"
        theirs = client(Authority(tmp_path / "theirs").sign("client"))
        with pytest.raises(ConfigError, match="is not signed by the authority in --tls-ca"):
            find_access(address, Role.WORKER, None, SECONDS, theirs)
        token_file.write_tokens(file, draw_tokens(make_certificate().digest))
        with pytest.raises(ConfigError, match="certificate mismatch at"):
            find_access(address, Role.WORKER, None, SECONDS, client(ours.sign("client")))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no authority", r"closes the connection of this program: .* or pass --tls-cert, --tls-key and"),
        ("address", r"IP address mismatch, certificate is not valid for '127\.0\.0\.1'; use a name in its"),
        ("pinned", r"is not signed by the authority in --tls-ca .*; if the server makes its own"),
    ],
)
def test_no_secret_is_for_a_server_that_does_not_fit(
    ours: Authority, tokens: Path, tmp_path: Path, case: str, message: str
) -> None:
    wanting = load_certificate(ours.sign("server", "localhost", HERE), serves=True)
    server, files = {
        "no authority": (wanting, ours.sign("client")._replace(ca=None)),
        "address": (load_certificate(ours.sign("named", "node1"), serves=True), ours.sign("client")),
        "pinned": (NO_CERTIFICATE, TlsFiles(ca=ours.file)),
    }[case]
    if case == "no authority":
        assert server.identity is not None
        tokens.unlink()
        token_file.write_tokens(tokens, draw_tokens(server.identity.digest))
    with serving(server) as address, pytest.raises(ConfigError, match=message):
        find_access(address, Role.WORKER, tokens, SECONDS, client(files))


def test_a_late_end_of_a_handshake_is_no_refusal(ours: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "STALLED_SECONDS", 0.0)
    monkeypatch.setattr(handshake, "_PAUSE_SECONDS", SECONDS)  # for the only try
    wanting = load_certificate(ours.sign("server", HERE), serves=True)
    with serving(wanting) as address, pytest.raises(ServerUnreachable, match="closed the connection"):
        fetch(address, Proof(), 0.0)


def test_an_insecure_client_of_a_server_with_an_authority_learns_what_is_missing(ours: Authority) -> None:
    own = load_certificate(ours.sign("server", HERE), serves=True)
    words = "asks for tokens and encrypts; remove --insecure"
    with serving(own) as address, pytest.raises(ConfigError, match=words):
        find_access(address, Role.WORKER, None, SECONDS, insecure=True)


def test_a_client_without_token_and_certificate_is_no_stranger_to_a_server(ours: Authority) -> None:
    own = load_certificate(ours.sign("server", HERE), serves=True)
    with serving(own) as address, pytest.raises(ConfigError, match="refused this program: it has no token"):
        find_access(address, Role.WORKER, None, SECONDS)


def test_a_copied_token_is_no_proof_of_a_server_that_renewed_its_certificate(
    ours: Authority, tokens: Path
) -> None:
    own = load_certificate(ours.sign("server", HERE)._replace(ca=None), serves=True)
    words = "file again, or pass --tls-ca, if the server has a certificate of your authority"
    with serving(own) as address, pytest.raises(ConfigError, match=words):
        find_access(address, Role.WORKER, tokens, SECONDS)
