"""Certificates are pinned: a client talks only to the server of its token."""

from __future__ import annotations

import base64
import errno
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.security import handshake, private_file, token_file
from hubring.ps.security.access import (
    CONNECT_SECONDS,
    LOOK_SECONDS,
    NO_ACCESS,
    Access,
    check_token_file,
    find_access,
    is_this_host,
    look_seconds,
)
from hubring.ps.security.certificate import (
    check_key,
    make_certificate,
    secret_authority,
    secret_certificate,
    show_identity,
)
from hubring.ps.security.guard import Guard, Role
from hubring.ps.security.handshake import Proof, ServerCertificate, fetch
from hubring.ps.security.keyring import make_files
from hubring.ps.security.token_file import draw_tokens
from hubring.ps.transport.grpc.channel import server_credentials
from tests.ps.security.health_server import SECONDS, SECRET, asks, serving
from tests.support.processes.stopwatch import Stopwatch

DIGEST = "0123456789abcdef" * 4


def test_a_client_fetches_the_certificate_of_its_token_and_talks_to_no_other() -> None:
    own, other = make_certificate(), make_certificate()
    assert own.digest != other.digest
    with serving(own) as address:
        found = fetch(address, Proof(own.digest, secret=SECRET), SECONDS)
        assert found == ServerCertificate(own.certificate)
        assert asks(address, Access(SECRET, own.certificate)) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(ConfigError, match="certificate mismatch at"):
            fetch(address, Proof(other.digest, secret=SECRET), SECONDS)
        with pytest.raises(grpc.RpcError):
            asks(address, Access(SECRET, other.certificate))


@pytest.mark.parametrize("secret", ["", SECRET[::-1]])
def test_a_server_closes_the_connection_of_a_client_that_has_no_secret_of_its(secret: str) -> None:
    """Before it reads anything that the client sends."""
    own = make_certificate()
    with serving(own) as address:
        with pytest.raises(ConfigError, match="it does not know the token, or wants a certificate of its"):
            fetch(address, Proof(own.digest, secret=secret), SECONDS)
        with pytest.raises(grpc.RpcError) as refused:
            asks(address, Access(secret, own.certificate))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_is_shown_where_memfd_create_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.EPERM, "not permitted")))
    show_identity(ssl.create_default_context(), make_certificate())


def test_a_rotation_changes_which_clients_are_let_in_and_keeps_members() -> None:
    own, new = make_certificate(), SECRET[::-1]
    guard = Guard({Role.WORKER: SECRET})
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        port = server.add_secure_port("127.0.0.1:0", server_credentials(own, guard))
        server.start()
        address = f"127.0.0.1:{port}"
        with pytest.raises(ConfigError):
            fetch(address, Proof(own.digest, secret=new), SECONDS)
        guard.rotate({Role.WORKER: new})
        for secret in (SECRET, new):
            assert fetch(address, Proof(own.digest, secret=secret), SECONDS).certificate == own.certificate
        server.stop(None).wait()


@pytest.mark.parametrize(
    "pem",
    [make_certificate().certificate, secret_authority(SECRET), secret_certificate(SECRET).certificate],
    ids=["server", "authority", "client"],
)
def test_what_proves_a_program_is_valid_whatever_the_clocks_of_the_hosts(pem: bytes) -> None:
    made = x509.load_pem_x509_certificate(pem)
    assert (made.not_valid_before_utc.year, made.not_valid_after_utc.year) == (1970, 9999)


def test_one_refusal_after_a_server_was_out_of_reach_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have been killed, and another one have taken over."""
    answers = iter(2 * [ConnectionRefusedError(), handshake._Closed()])
    found = ServerCertificate(b"found")

    def prove(address: str, proof: Proof, seconds: float) -> ServerCertificate:
        if error := next(answers, None):
            raise error
        return found

    monkeypatch.setattr(handshake, "SURE_SECONDS", 0.0)
    monkeypatch.setattr(handshake, "_prove", prove)
    assert fetch("127.0.0.1:1", Proof(), SECONDS) == found


def test_no_server_is_no_other_server() -> None:
    with serving(None) as address:
        pass
    with pytest.raises(ServerUnreachable, match="no server with TLS answers"):
        fetch(address, Proof(make_certificate().digest), 0.0)


def test_a_token_is_never_given_up_for_a_connection_without_tls(tmp_path: Path) -> None:
    """Otherwise who holds back connections until the server is due could offer a plaintext one."""
    file = make_files(tmp_path / "tokens")
    with serving(None) as address:
        pass
    with pytest.raises(ServerUnreachable, match=f"no server listens at {address}"):
        find_access(address, Role.WORKER, file, 0.0)


def test_a_client_without_a_token_trusts_a_server_without_tls_only_if_told_to(tmp_path: Path) -> None:
    """Otherwise a worker that starts before its server joins the program that has taken the port."""
    file = make_files(tmp_path / "tokens")
    with serving(None) as address:
        with pytest.raises(ServerUnreachable, match=f"no server with TLS answers at {address}"):
            find_access(address, Role.WORKER, None, SECONDS)
        assert find_access(address, Role.WORKER, None, SECONDS, insecure=True) == NO_ACCESS
        with pytest.raises(ConfigError, match="one that asks for none; remove one of the two"):
            find_access(address, Role.WORKER, file, SECONDS, insecure=True)
    with pytest.raises(ServerUnreachable, match=f"no server listens at {address}"):
        find_access(address, Role.WORKER, None, 0.0, insecure=True)


def test_insecure_is_refused_where_the_server_is_not() -> None:
    with (
        serving(make_certificate()) as address,
        pytest.raises(ConfigError, match=r"encrypts; remove --insecure$"),
    ):
        find_access(address, Role.WORKER, None, SECONDS, insecure=True)


def test_a_file_without_the_role_names_the_roles_that_it_has(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    token_file.write_tokens(file, {Role.READER: draw_tokens(DIGEST)[Role.READER]})
    with (
        serving(None) as address,
        pytest.raises(ConfigError, match="are for reader, but this program") as refusal,
    ):
        find_access(address, Role.WORKER, file, SECONDS)
    words = (
        "on the server's host, run: ps-server token show --token-file FILE --role worker, with the FILE in"
    )
    assert words in str(refusal.value)


@pytest.mark.slow
def test_a_token_file_that_is_not_there_yet_is_waited_for_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens"
    own = make_certificate()
    drawn = draw_tokens(own.digest)
    known = [token.secret for token in drawn.values()]
    with serving(own, secrets=known) as address, ThreadPoolExecutor(1) as thread:
        found = thread.submit(find_access, address, Role.WORKER, tokens, 60.0)
        while f"for {tokens}, the file with the server's token" not in caplog.text:
            assert not found.done(), found.result()
            time.sleep(0.01)
        token_file.write_tokens(tokens, drawn)
        assert found.result().secret


def test_a_token_file_whose_folder_is_not_there_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Stopwatch()
    with (
        serving(make_certificate()) as address,
        pytest.raises(ConfigError, match=r"cannot read the tokens in .*No such"),
    ):
        find_access(address, Role.WORKER, tmp_path / "none" / "tokens", 60.0)
    assert watch.seconds < 30
    assert caplog.text == ""


def test_a_token_file_is_checked_before_slow_imports(tmp_path: Path) -> None:
    file, reader = tmp_path / "tokens", draw_tokens(DIGEST)[Role.READER]
    check_token_file(None, Role.WORKER)
    check_token_file(file, Role.WORKER)  # a server may still write it
    with pytest.raises(ConfigError, match="No such file"):
        check_token_file(tmp_path / "none" / "tokens", Role.WORKER)
    for text, message in (("junk", "is no token"), (str(reader), "are for reader, but this program needs")):
        private_file.write(file, text)
        with pytest.raises(ConfigError, match=message):
            check_token_file(file, Role.WORKER)
    check_token_file(file, Role.READER)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ps_worker", "ps_run"])
def test_programs_report_a_wrong_token_file_before_they_import_torch(tmp_path: Path, program: str) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "tokens").write_text("junk")
    (tmp_path / "script.py").touch()
    words = ["--server", "127.0.0.1:1"] if program == "ps_worker" else ["-np", "1"]
    command = [sys.executable, "-m", f"hubring.workers.programs.{program}", *words, f"{tmp_path}/script.py"]
    path = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    variables = {**environment(), "PYTHONPATH": path, "PS_TOKEN_FILE": str(tmp_path / "tokens")}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "other users can read the tokens" in ended.stderr
    assert ended.returncode == 78


def test_a_secret_of_a_server_here_is_not_sent_to_another_host() -> None:
    elsewhere = "192.0.2.99:5555"  # TEST-NET-1 (RFC 5737)
    assert is_this_host("127.0.0.1")
    assert is_this_host("localhost")
    assert not is_this_host("192.0.2.99")
    assert not is_this_host("no.such.host.invalid")
    tokens = draw_tokens(DIGEST)
    token_file.write_tokens(token_file.runtime_file(5555), tokens)
    with pytest.raises(ServerUnreachable, match=f"no server with TLS answers at {elsewhere}"):
        find_access(elsewhere, Role.WORKER, None, 0.0)


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
    own = make_certificate()
    for certificate in flips(own.certificate):
        identity = own._replace(certificate=certificate)
        assert identity.digest != own.digest
        with suppress(ValueError):
            check_key(identity)
    for key in flips(own.key):
        with suppress(ValueError):  # unless it is still the key
            check_key(own._replace(key=key))
