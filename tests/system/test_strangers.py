"""Who has no token reads nothing, changes nothing, and the job goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.security.token_file import runtime_file
from hubring.ps.transport.host import reachable
from tests.support.processes.cluster import PATIENCE, SMALL, Cluster

FOREVER = "1000000"


def own_address() -> str:
    """This host's address for others."""
    return reachable("0.0.0.0")


def steps(cluster: Cluster, address: str) -> int:
    return max((worker["step"] for worker in cluster.status(address)["workers"]), default=0)


@pytest.mark.slow
def test_another_user_of_the_host_is_refused_everything(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "1", "--no-page")
    worker = cluster.worker(address, SMALL, FOREVER)
    worker.until(lambda: steps(cluster, address) > 0, "steps")
    (shard,) = server.children("hubring.ps.shard.process")
    file = runtime_file(int(address.rpartition(":")[2]))
    stranger = cluster.run("stranger", "tests.support.scripts.stranger", address, str(file), str(shard))
    found = stranger.done()
    assert found.pop("token file") == "PermissionError"
    assert found.pop("zmq") == "refusal"
    shared = [outcome for name, outcome in found.items() if name.startswith("shm")]
    assert shared
    assert "allowed" not in shared
    others = {name: outcome for name, outcome in found.items() if not name.startswith("shm")}
    assert len(others) >= 31
    assert set(others.values()) == {"UNAUTHENTICATED"}, others
    before = steps(cluster, address)
    worker.until(lambda: steps(cluster, address) > before, "more steps")
    assert "\x1b" not in server.said()
    assert server.said().count("WARNING: refused a call of") < 10  # of more than 24


@pytest.mark.slow
def test_a_wrong_and_a_missing_token_are_told_and_the_right_one_trains(
    cluster: Cluster, tmp_path: Path
) -> None:
    tokens, other = tmp_path / "tokens", tmp_path / "other"
    server, address = cluster.server("--workers", "1", "--once", "--token-file", str(tokens))
    cluster.run("new", "hubring.ps.cli", "token", "new", str(other)).done()
    without = cluster.worker(address, SMALL, "5")
    assert without.wait() == 78
    assert "refused this program: it has no token. Copy the server's token file" in without.said()
    wrong = cluster.worker(address, "--token-file", str(other), SMALL, "5")
    assert wrong.wait() != 0
    assert "token" in wrong.said()
    doctor = cluster.run("doctor", "hubring.ps.cli", "doctor", address, "--token-file", str(tokens))
    assert doctor.wait() == 0, doctor.said()
    right = cluster.worker(address, "--token-file", str(tokens), SMALL, "5")
    right.done()
    server.done()
    secrets = [line.rpartition(":")[2] for line in tokens.read_text().split()]
    said = "".join(program.said() + program.out.read_text() for program in cluster.programs)
    assert not [secret for secret in secrets if secret in said]


@pytest.mark.slow
def test_rotated_tokens_end_nobodys_membership(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "1", "--no-page")
    file = runtime_file(int(address.rpartition(":")[2]))
    earlier = cluster.folder / "earlier"
    earlier.write_text(file.read_text())
    earlier.chmod(0o600)
    worker = cluster.worker(address, SMALL, FOREVER)
    worker.until(lambda: steps(cluster, address) > 0, "steps")
    cluster.run("rotate", "hubring.ps.cli", "token", "rotate", address).done()
    expired = cluster.run("status", "hubring.ps.cli", "status", address, "--token-file", str(earlier))
    assert expired.wait() == 78
    assert "the token has expired, because the server's tokens were rotated" in expired.said()
    before = steps(cluster, address)
    worker.until(lambda: steps(cluster, address) > before, "more steps", PATIENCE)
    assert server.process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq", "grpc"])
def test_beyond_loopback_everything_is_encrypted(cluster: Cluster, transport: str) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--host", own_address())
    pair = [cluster.worker(address, "--transport", transport, SMALL, "10") for _ in range(2)]
    losses = [worker.done()["metrics"]["loss"] for worker in pair]
    server.done()
    plain, address = cluster.server("--workers", "2", "--once", name="plain")
    again = [cluster.worker(address, "--transport", transport, SMALL, "10") for _ in range(2)]
    assert sorted(losses) == sorted(worker.done()["metrics"]["loss"] for worker in again)
    plain.done()
