"""Certificates of an authority: real programs show them at both ends of every connection of gRPC."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path

import grpc
import pytest

from hubring.ps.config.tls import TlsFiles
from hubring.ps.observe.health_check import probe
from hubring.ps.security.access import find
from hubring.ps.security.own_certificate import load
from hubring.ps.security.policy import Role
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.host import reachable
from tests.support.certificates import Authority, flags
from tests.support.processes.cluster import PATIENCE, SMALL, Cluster

pytestmark = pytest.mark.slow

HERE = "127.0.0.1"


@pytest.fixture(name="ours")
def _ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def refused_without_a_certificate(address: str) -> bool:
    """Whether a shard closes the connection of a client without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE) as plain,
        context.wrap_socket(plain) as encrypted,
    ):
        try:
            return not encrypted.recv(1)
        except OSError:
            return True


@pytest.mark.parametrize("transport", ["shm", "zmq", "grpc"])
@pytest.mark.parametrize("host", ["loopback", "beyond"])
def test_a_job_trains_with_certificates_at_all_ends(
    cluster: Cluster, ours: Authority, tmp_path: Path, host: str, transport: str
) -> None:
    here = HERE if host == "loopback" else reachable("0.0.0.0")
    own, tokens = ours.sign("server", here), ["--token-file", str(tmp_path / "tokens")]
    command = ["--once", "--host", here, *tokens, *flags(own), "--workers", "2"]
    server, address = cluster.server(*command)
    mine = flags(ours.sign("worker"))
    server.until_said("joined (transports")
    status = cluster.run("status", "hubring.ps.cli", "status", address, *tokens, *mine).done()
    (shard,) = status["shards"]
    assert refused_without_a_certificate(shard["address"])
    pair = [cluster.worker(address, *tokens, *mine, "--transport", transport, SMALL, "5") for _ in range(2)]
    for worker in pair:
        assert worker.done()["steps"] == 5
    server.done()
    assert "WARNING" not in server.said().replace("WARNING: this server was paused", "")


def test_shards_of_other_hosts_and_of_workers_show_theirs(
    cluster: Cluster, ours: Authority, tmp_path: Path
) -> None:
    tokens = ["--token-file", str(tmp_path / "tokens")]
    own = flags(ours.sign("server", HERE))
    server, address = cluster.server("--once", *tokens, *own, "--shards", "0", "--await-shards", "1")
    shard = cluster.run(
        "shard", "hubring.ps.cli", "start", "--join", address, *tokens, *flags(ours.sign("other", HERE))
    )
    mine = flags(ours.sign("worker"))
    assert cluster.worker(address, *tokens, *mine, "--transport", "grpc", SMALL, "5").done()["steps"] == 5
    server.done()
    shard.done()
    own = flags(ours.sign("server", HERE))
    server, address = cluster.server(
        "--once", *tokens, *own, "--colocate", "--workers", "2", name="colocating"
    )
    pair = [cluster.worker(address, *tokens, *mine, "--transport", "grpc", SMALL, "5") for _ in range(2)]
    for worker in pair:
        assert worker.done()["steps"] == 5
    server.done()


def test_tokens_of_this_users_server_work_with_certificates(cluster: Cluster, ours: Authority) -> None:
    """A name for loopback is not needed, as ps-run shows: it starts both ends."""
    files = ours.sign("host", "node1.example")
    given = {f"PS_TLS_{name.upper()}": str(file) for name, file in files._asdict().items()}
    command = ["-np", "2", SMALL, "5"]
    run = cluster.run("run", "hubring.workers.programs.ps_run", *command, variables=given)
    assert run.wait() == 0, run.said()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "closes the connection of a program without a certificate"),
        ("another authority", "is not signed by the authority in --tls-ca"),
        ("host name", "Hostname mismatch, certificate is not valid for 'localhost'"),
        ("expired", "certificate has expired"),
        ("another key", "does not belong to the certificate in --tls-cert"),
        ("no key", "needs --tls-key FILE"),
        ("unreadable", "cannot read --tls-ca"),
    ],
)
def test_a_wrong_certificate_is_told_by_worker_and_doctor(
    cluster: Cluster, ours: Authority, tmp_path: Path, case: str, message: str
) -> None:
    theirs, good, tokens = Authority(tmp_path / "theirs"), ours.sign("worker"), tmp_path / "tokens"
    _, address = cluster.server("--no-page", "--token-file", str(tokens), *flags(ours.sign("server", HERE)))
    files = {
        "missing": TlsFiles(),
        "another authority": theirs.sign("worker"),
        "host name": good,
        "expired": ours.sign("old", days=-1),
        "another key": good._replace(key=ours.sign("second").key),
        "no key": good._replace(key=None),
        "unreadable": good._replace(ca=tmp_path / "none"),
    }[case]
    there = address.replace(HERE, "localhost") if case == "host name" else address
    words = ["--token-file", str(tokens), *flags(files)]
    worker = cluster.worker(there, *words, SMALL, "5")
    doctor = cluster.run("doctor", "hubring.ps.cli", "doctor", there, "--timeout", "60", *words)
    assert worker.wait() == 78
    assert message in worker.said()
    assert doctor.wait() == 78
    assert message in doctor.said() or message in json.dumps(doctor.result()), doctor.said()


def test_strangers_handshakes_leave_no_trace_in_the_log(cluster: Cluster, ours: Authority) -> None:
    """Each would be a line with text of the stranger."""
    server, address = cluster.server("--no-page", *flags(ours.sign("server", HERE)))
    host, _, port = address.rpartition(":")
    for _ in range(20):
        assert refused_without_a_certificate(address)
        with socket.create_connection((host, int(port)), PATIENCE) as line:
            line.sendall(b"\x1b[31mno handshake\n" * 9)
            line.shutdown(socket.SHUT_WR)
            while line.recv(1 << 12):
                pass
    own = load(ours.sign("client"), serves=False)
    with open_channel(address, find(address, Role.READER, None, PATIENCE, own)) as channel:
        grpc.channel_ready_future(channel).result(PATIENCE)
    probe(address, "", PATIENCE, own)
    assert "\x1b" not in server.said()
    assert "ssl" not in server.said().lower()
