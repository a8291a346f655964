"""Another user takes the port of a server or a shard that was killed: no client tells it a secret."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from hubring.ps.security.token_file import runtime_file
from hubring.ps.transport.zmq.socket import QUESTION
from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.ports import free_port
from tests.support.transports.thief import tcp_thief, zmq_thief

pytestmark = pytest.mark.slow


def killed(cluster: Cluster, *flags: str) -> str:
    """The address of a server that was killed, so that its tokens stay."""
    server, address = cluster.server("--workers", "1", "--no-page", *flags)
    server.process.send_signal(signal.SIGKILL)
    server.wait()
    return address


def clients(cluster: Cluster, address: str, *flags: str) -> list[Program]:
    """One for each role."""
    return [
        cluster.worker(address, *flags, SMALL, "5"),
        cluster.run("shard", "hubring.ps.cli", "start", "--join", address, *flags),
        cluster.run("reader", "hubring.ps.cli", "status", address, *flags),
        cluster.run("operator", "hubring.ps.cli", "token", "rotate", address, *flags),
    ]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        pytest.param("plain", True, id="plain-token-file", marks=pytest.mark.full),
        pytest.param("tls", False, id="tls-runtime-directory"),
        pytest.param("plain", False, id="plain-runtime-directory", marks=pytest.mark.full),
        pytest.param("tls", True, id="tls-token-file", marks=pytest.mark.full),
    ],
)
def test_no_client_tells_a_secret_to_who_took_the_port(
    cluster: Cluster, tmp_path: Path, kind: str, named: bool
) -> None:
    flags = ["--token-file", str(tmp_path / "tokens")] if named else []
    address = killed(cluster, *flags)
    port = address.rpartition(":")[2]
    tokens, heard = tmp_path / "tokens" if named else runtime_file(int(port)), tmp_path / "heard"
    squatter = cluster.run("squatter", "tests.support.scripts.squatter", port, kind, str(heard))
    squatter.until(lambda: "listening" in squatter.out.read_text(), "listening")
    expected = {
        "plain": "does not use TLS, but the token is for one that does",
        "tls": "this token belongs to another server",
    }[kind]
    refused = clients(cluster, address, *flags)
    codes = [program.wait() for program in refused]
    said = heard.read_text() if heard.exists() else ""
    assert not [line for line in tokens.read_text().split() if line.rpartition(":")[2] in said]
    assert "authorization" not in said
    assert codes == [78] * len(refused)
    assert all(expected in program.said() for program in refused)


def test_no_client_without_a_token_joins_who_took_the_port_before_the_server(
    cluster: Cluster, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    port = str(free_port())
    squatter = cluster.run("squatter", "tests.support.scripts.squatter", port, "plain", str(heard))
    squatter.until(lambda: "listening" in squatter.out.read_text(), "listening")
    refused = clients(cluster, f"127.0.0.1:{port}")
    assert [program.wait() for program in refused] == [69] * len(refused)
    assert not heard.exists()
    assert all("uses gRPC without TLS" in program.said() for program in refused)


TLS_HANDSHAKE = b"\x16\x03"


@pytest.mark.parametrize("transport", ["zmq-tcp", pytest.param("grpc-tcp", marks=pytest.mark.full)])
def test_a_worker_tells_nothing_to_who_took_the_ports_of_its_shard(cluster: Cluster, transport: str) -> None:
    server, address = cluster.server("--workers", "1", "--once")
    (worker,) = cluster.held(address, "--transport", transport, "--timeout", "10", count=1, steps=1_000_000)
    (shard,) = server.children("hubring.ps.shard.process")
    connections = psutil.Process(shard).net_connections("tcp")
    ports = [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
    server.process.send_signal(signal.SIGSTOP)  # so that it does not report the lost shard to the worker
    psutil.Process(shard).kill()
    over_zmq = transport == "zmq-tcp"
    thief: Any = zmq_thief(ports, answer=bytes(24)) if over_zmq else tcp_thief(ports)
    with thief as heard:
        cluster.go.touch()
        worker.until(lambda: len(heard) > over_zmq, "attempts to reconnect")
        server.process.send_signal(signal.SIGCONT)
        assert worker.wait() == 69
    assert all(each == [QUESTION] if over_zmq else each.startswith(TLS_HANDSHAKE) for each in heard)
