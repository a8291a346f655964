"""Certificates are pinned: a client talks only to the server of its token."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.security import token_file
from hubring.ps.security.access import (
    CONNECT_SECONDS,
    LOOK_SECONDS,
    NO_ACCESS,
    Access,
    find,
    is_this_host,
    look_seconds,
)
from hubring.ps.security.certificate import check_key, digest_of, make
from hubring.ps.security.handshake import Peer, Proof, fetch, peek
from hubring.ps.security.keyring import make_files
from hubring.ps.security.policy import Role
from hubring.ps.security.token import draw
from tests.ps.security.health_server import SECONDS, asks, serving

DIGEST = "0123456789abcdef" * 4


def test_a_client_fetches_the_certificate_of_its_token_and_talks_to_no_other() -> None:
    own, other = make(), make()
    assert own.digest == digest_of(own.certificate) != other.digest
    with serving(own) as address:
        assert fetch(address, Proof(own.digest), SECONDS) == Peer(own.certificate) == peek(address, SECONDS)
        assert asks(address, Access(certificate=own.certificate)) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(ConfigError, match="has another certificate than the token says"):
            fetch(address, Proof(other.digest), SECONDS)
        with pytest.raises(grpc.RpcError):
            asks(address, Access(certificate=other.certificate))


def test_a_server_without_tls_is_not_taken_for_one_with_tls() -> None:
    with serving(None) as address:
        assert peek(address, SECONDS) == Peer()
        with pytest.raises(ConfigError, match="does not use TLS, but the token is for one that does"):
            fetch(address, Proof(make().digest), SECONDS)


def test_no_server_is_no_other_server() -> None:
    with serving(None) as address:
        pass
    with pytest.raises(ServerUnreachable, match="no server with TLS answers"):
        fetch(address, Proof(make().digest), 0.0)


def test_a_client_without_a_token_for_a_server_with_tls_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serving(make()) as address, pytest.raises(ConfigError, match=r"it has no token.*--token-file"):
        find(address, Role.WORKER, None, SECONDS)


def test_a_token_is_never_given_up_for_a_connection_without_tls(tmp_path: Path) -> None:
    """Otherwise who holds back connections until the server is due could offer a plaintext one."""
    file = make_files(tmp_path / "tokens")
    with serving(None) as address:
        pass
    with pytest.raises(ServerUnreachable, match=f"no server listens at {address}"):
        find(address, Role.WORKER, file, 0.0)


def test_a_client_without_a_token_trusts_a_server_without_tls_only_if_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker that starts before its server joins the program that has taken the port."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = make_files(tmp_path / "tokens")
    with serving(None) as address:
        with pytest.raises(ServerUnreachable, match=f"no server with TLS answers at {address}"):
            find(address, Role.WORKER, None, SECONDS)
        assert find(address, Role.WORKER, None, SECONDS, insecure=True) == NO_ACCESS
        with pytest.raises(ConfigError, match="one that asks for none; remove one of the two"):
            find(address, Role.WORKER, file, SECONDS, insecure=True)
    with pytest.raises(ServerUnreachable, match=f"no server listens at {address}"):
        find(address, Role.WORKER, None, 0.0, insecure=True)


def test_insecure_is_refused_where_the_server_is_not() -> None:
    with serving(make()) as address, pytest.raises(ConfigError, match="encrypts; remove --insecure"):
        find(address, Role.WORKER, None, SECONDS, insecure=True)


def test_a_file_without_the_role_names_the_roles_that_it_has(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    token_file.write_tokens(file, {Role.READER: draw(DIGEST)[Role.READER]})
    with serving(None) as address, pytest.raises(ConfigError, match="are for reader; this program needs"):
        find(address, Role.WORKER, file, SECONDS)


def test_a_secret_of_a_server_here_is_not_sent_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    elsewhere = "192.0.2.99:5555"  # TEST-NET-1 (RFC 5737)
    assert is_this_host("127.0.0.1")
    assert is_this_host("localhost")
    assert not is_this_host("192.0.2.99")
    assert not is_this_host("no.such.host.invalid")
    tokens = draw(DIGEST)
    token_file.write_tokens(token_file.runtime_file(5555), tokens)
    with pytest.raises(ServerUnreachable, match=f"no server with TLS answers at {elsewhere}"):
        find(elsewhere, Role.WORKER, None, 0.0)


def test_a_server_on_another_host_is_looked_for_longer() -> None:
    assert look_seconds("127.0.0.1:5555") == LOOK_SECONDS
    assert look_seconds("192.0.2.99:5555") == CONNECT_SECONDS  # TEST-NET-1 (RFC 5737)


def flips(pem: bytes) -> Iterator[bytes]:
    """Gives a PEM text with each bit of its content flipped, one after the other."""
    first, *middle, last = pem.splitlines()
    content = base64.b64decode(b"".join(middle))
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield b"\n".join((first, base64.b64encode(flipped), last, b""))


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # of the one flip of its sign
def test_a_flipped_bit_in_a_certificate_or_its_key_is_a_value_error_or_seen_by_the_digest() -> None:
    own = make()
    for certificate in flips(own.certificate):
        identity = own._replace(certificate=certificate)
        assert identity.digest != own.digest
        with suppress(ValueError):
            check_key(identity)
    for key in flips(own.key):
        with suppress(ValueError):  # unless it is still the key
            check_key(own._replace(key=key))
