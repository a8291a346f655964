"""A client with an authority: which servers it talks to, and which servers talk to it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from hubring.ps.config.tls import TlsFiles
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.observe.health_check import probe
from hubring.ps.security import handshake, token_file
from hubring.ps.security.access import find
from hubring.ps.security.certificate import Identity, make
from hubring.ps.security.own_certificate import NOTHING, Own, load
from hubring.ps.security.policy import Role
from hubring.ps.security.token import draw
from tests.ps.security import health_server
from tests.ps.security.health_server import SECONDS
from tests.support.certificates import Authority

HERE = "127.0.0.1"


def serving(own: Own) -> AbstractContextManager[str]:
    return health_server.serving(own.identity or make(), own.authority)


@pytest.fixture(name="ours")
def _ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(handshake, "SURE_SECONDS", 0.0)
    return Authority(tmp_path / "ours")


@pytest.fixture(name="tokens")
def _tokens(tmp_path: Path) -> Path:
    """Tokens of a certificate that the server no longer has."""
    token_file.write_tokens(tmp_path / "tokens", draw(make().digest))
    return tmp_path / "tokens"


def client(files: TlsFiles) -> Own:
    return load(files, serves=False)


def asks(address: str, tokens: Path, own: Own) -> int:
    access = find(address, Role.WORKER, tokens, SECONDS, own)
    assert access.secret == token_file.read(tokens)[Role.WORKER].secret
    return health_server.asks(address, access)


@pytest.mark.parametrize("host", [HERE, "localhost"])
def test_both_ends_show_certificates_of_one_authority(ours: Authority, tokens: Path, host: str) -> None:
    with serving(load(ours.sign("server", "localhost", HERE), serves=True)) as address:
        there = address.replace(HERE, host)
        assert asks(there, tokens, client(ours.sign("client"))) == health_pb2.HealthCheckResponse.SERVING
        probe(there, "", SECONDS, client(ours.sign("client")))


def test_an_intermediate_follows_the_certificate_that_it_signed(
    ours: Authority, tokens: Path, tmp_path: Path
) -> None:
    between = Authority(tmp_path / "between", ours)
    files = between.sign("server", HERE)
    assert files.ca == ours.file
    with serving(load(files, serves=True)) as address:
        found = asks(address, tokens, client(between.sign("client")))
        assert found == health_pb2.HealthCheckResponse.SERVING


def test_a_server_may_want_no_certificate(ours: Authority, tokens: Path) -> None:
    own = load(ours.sign("server", HERE)._replace(ca=None), serves=True)
    with serving(own) as address:
        found = asks(address, tokens, client(TlsFiles(ca=ours.file)))
        assert found == health_pb2.HealthCheckResponse.SERVING


def test_without_an_authority_the_token_proves_an_own_certificate(ours: Authority, tmp_path: Path) -> None:
    own = load(ours.sign("server", "server.example"), serves=True)
    assert own.identity is not None
    token_file.write_tokens(tmp_path / "pinned", draw(own.identity.digest))
    with serving(own) as address:
        files = ours.sign("client")._replace(ca=None)
        assert asks(address, tmp_path / "pinned", client(files)) == health_pb2.HealthCheckResponse.SERVING


def test_tokens_of_this_users_server_need_no_name(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = load(ours.sign("server", "server.example"), serves=True)
    assert own.identity is not None
    with serving(own) as address:
        file = token_file.runtime_file(int(address.rpartition(":")[2]))
        token_file.write_tokens(file, draw(own.identity.digest))
        access = find(address, Role.WORKER, None, SECONDS, client(ours.sign("client")))
        assert access.name == "server.example"
        theirs = client(Authority(tmp_path / "theirs").sign("client"))
        with pytest.raises(ConfigError, match="is not signed by the authority in --tls-ca"):
            find(address, Role.WORKER, None, SECONDS, theirs)
        token_file.write_tokens(file, draw(make().digest))
        with pytest.raises(ConfigError, match="has another certificate than the token says"):
            find(address, Role.WORKER, None, SECONDS, client(ours.sign("client")))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no certificate", r"closes the connection of a program without a certificate.*pass --tls-cert"),
        ("another authority's", r"closes the connection of the program with --tls-cert .*client\.pem"),
        ("server of another", r"is not signed by the authority in --tls-ca .*theirs"),
        ("host name", r"Hostname mismatch, certificate is not valid for 'localhost'; use a name in its"),
        ("address", r"IP address mismatch, certificate is not valid for '127\.0\.0\.1'; use a name in its"),
        ("expired", r"certificate has expired; renew it, restart the server"),
        ("pinned", r"is not signed by the authority in --tls-ca .*; if the server makes its own"),
    ],
)
def test_no_secret_is_for_a_server_that_does_not_fit(
    ours: Authority, tokens: Path, tmp_path: Path, case: str, message: str
) -> None:
    theirs = Authority(tmp_path / "theirs")
    good, named = ours.sign("server", "localhost", HERE), ours.sign("named", "node1")
    wanting = load(good, serves=True)
    expired = Own(_read(ours.sign("old", HERE, days=-1)))
    mine = ours.sign("client")
    server, files, host = {
        "no certificate": (wanting, TlsFiles(ca=ours.file), HERE),
        "another authority's": (wanting, theirs.sign("client")._replace(ca=None), HERE),
        "server of another": (wanting, theirs.sign("client"), HERE),
        "host name": (load(named, serves=True), mine, "localhost"),
        "address": (load(named, serves=True), mine, HERE),
        "expired": (expired, TlsFiles(ca=ours.file), HERE),
        "pinned": (NOTHING, TlsFiles(ca=ours.file), HERE),
    }[case]
    if case == "another authority's":
        assert server.identity is not None
        tokens.unlink()
        token_file.write_tokens(tokens, draw(server.identity.digest))
    with serving(server) as address, pytest.raises(ConfigError, match=message):
        find(address.replace(HERE, host), Role.WORKER, tokens, SECONDS, client(files))


def test_an_insecure_client_of_a_server_with_an_authority_learns_what_is_missing(ours: Authority) -> None:
    own = load(ours.sign("server", HERE), serves=True)
    words = "asks for tokens and encrypts; remove --insecure, and pass --tls-cert, --tls-key and --tls-ca"
    with serving(own) as address, pytest.raises(ConfigError, match=words):
        find(address, Role.WORKER, None, SECONDS, insecure=True)


def test_a_client_without_token_and_certificate_is_no_stranger_to_a_server(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = load(ours.sign("server", HERE), serves=True)
    with serving(own) as address, pytest.raises(ConfigError, match="refused this program: it has no token"):
        find(address, Role.WORKER, None, SECONDS)


def test_a_copied_token_is_no_proof_of_a_server_that_renewed_its_certificate(
    ours: Authority, tokens: Path
) -> None:
    own = load(ours.sign("server", HERE)._replace(ca=None), serves=True)
    words = "copy its token file again, or pass --tls-ca, if the server has a certificate of your authority"
    with serving(own) as address, pytest.raises(ConfigError, match=words):
        find(address, Role.WORKER, tokens, SECONDS)


def test_a_probe_without_a_certificate_says_so(ours: Authority) -> None:
    own = load(ours.sign("server", HERE), serves=True)
    with serving(own) as address, pytest.raises(ServerUnreachable, match="pass --tls-cert and --tls-key"):
        probe(address, "", SECONDS)


def _read(files: TlsFiles) -> Identity:
    assert files.cert is not None
    assert files.key is not None
    return Identity(files.cert.read_bytes(), files.key.read_bytes())
