"""What a server holds: the model, the optimizer's state, one gradient a worker, and no more with time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.cluster import SCRIPTS, SMALL, Cluster, Program, await_all

pytestmark = pytest.mark.slow

LARGE = str(SCRIPTS / "large.py")
MEBI = 2**20
MODEL = 50
"""MiB of parameters."""


def held(server: Program) -> int:
    """Bytes of the server's one shard process; what it shares with others counts in parts (proc(5), Pss).

    Files count for nothing: how much of torch's libraries is ours depends on who else has mapped them.
    """
    (shard,) = server.children("hubring.ps.shard.process")
    rollup = Path(f"/proc/{shard}/smaps_rollup").read_text().splitlines()
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith(kinds))


@pytest.mark.full
def test_a_shard_does_not_grow_over_10_000_steps_on_any_transport(cluster: Cluster, tmp_path: Path) -> None:
    steps, transports = 10_000, ("shm", "zmq", "grpc")
    server, address = cluster.server("--workers", str(len(transports)), "--once")
    early, late = tmp_path / "early", tmp_path / "late"
    job = [SMALL, str(steps + 1), "16", "hold", str(early), "1000", "hold", str(late), str(steps)]
    workers = [cluster.worker(address, "--transport", transport, *job) for transport in transports]
    await_all(workers, "holding at 1000")
    before = held(server)
    early.touch()
    await_all(workers, f"holding at {steps}")
    after = held(server)
    late.touch()
    assert [worker.done()["steps"] for worker in workers] == [steps + 1] * len(transports)
    server.done()
    assert after - before < MEBI


@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(wire, marks=pytest.mark.full) for wire in ("zmq", "grpc"))]
)
def test_a_shard_holds_parameters_state_and_one_gradient_a_worker(
    cluster: Cluster, tmp_path: Path, transport: str
) -> None:
    base, whole = (_with_a_model(cluster, tmp_path, transport, megabytes) for megabytes in (1, MODEL))
    parameters, momentum, gradients = MODEL, MODEL, 2 * MODEL
    on_the_way = 96 if transport == "grpc" else 0  # a worker: 20 MiB in a bounded queue, 6 frames in gRPC
    assert whole - base < (parameters + momentum + gradients + on_the_way + 16) * MEBI


def _with_a_model(cluster: Cluster, tmp_path: Path, transport: str, megabytes: int) -> int:
    go = tmp_path / f"go-{megabytes}"
    # Slices that have just arrived come on top, and the tuner might choose large ones.
    small = ("--slice-bytes", str(2 * MEBI))
    server, address = cluster.server("--workers", "2", "--once", *small, name=f"server-{megabytes}-MiB")
    pair = cluster.ranks(address, 2, "--transport", transport, LARGE, str(megabytes), "5", str(go))
    await_all(pair, "holding")
    found = held(server)
    go.touch()
    for worker in pair:
        worker.done()
    server.done()
    return found
