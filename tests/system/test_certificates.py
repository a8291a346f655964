"""Certificates of an authority: real programs show them at both ends of every connection of gRPC."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from hubring.ps.config.declaration import TlsFiles
from hubring.ps.observe.health import probe
from hubring.ps.security.access import find_access
from hubring.ps.security.certificate import load_certificate
from hubring.ps.security.guard import Role
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.host import reachable
from tests.support.certificates import Authority, flags
from tests.support.processes.cluster import PATIENCE, SMALL, Cluster
from tests.support.processes.fork_server import ForkServer

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


@pytest.mark.parametrize(
    ("host", "transport"),
    [
        ("beyond", "grpc"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in product(("loopback", "beyond"), ("shm", "zmq", "grpc"))
            if case != ("beyond", "grpc")
        ),
    ],
)
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
    assert [worker.done()["steps"] for worker in pair] == [5, 5]
    server.done()
    assert "WARNING" not in server.said().replace("WARNING: this server was paused", "")


def test_shards_of_other_hosts_and_of_workers_show_theirs(
    cluster: Cluster, ours: Authority, tmp_path: Path
) -> None:
    tokens = ["--token-file", str(tmp_path / "tokens")]
    own = flags(ours.sign("server", HERE))
    server, address = cluster.server("--once", *tokens, *own, "--shards", "0", "--await-shards", "1")
    other = flags(ours.sign("other", HERE))
    shard = cluster.run("shard", "hubring.ps.cli", "start", "--join", address, *tokens, *other)
    mine = flags(ours.sign("worker"))
    assert cluster.worker(address, *tokens, *mine, "--transport", "grpc", SMALL, "5").done()["steps"] == 5
    server.done()
    shard.done()
    colocates = ["--once", "--colocate", "--workers", "2"]
    server, address = cluster.server(*colocates, *tokens, *own, name="colocating")
    pair = [cluster.worker(address, *tokens, *mine, "--transport", "grpc", SMALL, "5") for _ in range(2)]
    assert [worker.done()["steps"] for worker in pair] == [5, 5]
    server.done()


def test_tokens_of_this_users_server_work_with_certificates(cluster: Cluster, ours: Authority) -> None:
    """A name for loopback is not needed, as ps-run shows: it starts both ends."""
    files = ours.sign("host", "node1.example")
    given = {f"PS_TLS_{name.upper()}": str(file) for name, file in files._asdict().items()}
    command = ["-np", "2", SMALL, "5"]
    run = cluster.run("run", "hubring.workers.programs.ps_run", *command, variables=given)
    assert run.wait() == 0, run.said()


class Door(NamedTuple):
    """A server that asks for certificates of our authority."""

    address: str
    tokens: Path
    files: dict[str, TlsFiles]
    """What clients show, by what is wrong with it."""


@pytest.fixture(scope="module")
def door(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    ours, tokens = Authority(folder / "ours"), folder / "tokens"
    own = flags(ours.sign("server", HERE))
    files = {"missing": TlsFiles(), "host name": ours.sign("worker"), "expired": ours.sign("old", days=-1)}
    with Cluster(folder, fork_server) as cluster:
        server, address = cluster.server("--no-page", "--token-file", str(tokens), *own)
        server.until_said("shard 0")  # else its process would count as one that the first test started
        yield Door(address, tokens, files)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "it does not know the token, or wants a certificate of its authority"),
        ("host name", "Hostname mismatch, certificate is not valid for 'localhost'"),
        ("expired", "certificate has expired"),
    ],
)
def test_a_wrong_certificate_is_told(cluster: Cluster, door: Door, case: str, message: str) -> None:
    there = door.address.replace(HERE, "localhost") if case == "host name" else door.address
    worker = cluster.worker(there, "--token-file", str(door.tokens), *flags(door.files[case]), SMALL, "5")
    assert worker.wait() == 78
    assert message in worker.said(), worker.said()


@pytest.mark.full
def test_the_doctor_tells_of_a_wrong_certificate(cluster: Cluster, door: Door) -> None:
    words = ["--timeout", "60", "--token-file", str(door.tokens), *flags(door.files["expired"])]
    doctor = cluster.run("doctor", "hubring.ps.cli", "doctor", door.address, *words)
    assert "certificate has expired" in json.dumps(doctor.done(78))


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
    own = load_certificate(ours.sign("client"), serves=False)
    with open_channel(address, find_access(address, Role.READER, None, PATIENCE, own)) as channel:
        probe(channel, address, "", PATIENCE)
    assert "\x1b" not in server.said()
    assert "ssl" not in server.said().lower()
