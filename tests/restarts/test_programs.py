"""ps-server and ps-worker start themselves again after a loss, and find each other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hubring.ps.checkpoint.checkpoint_folder import newest_step
from tests.restarts.kills import FLAGS, same
from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]

STEPS = 60
SERVER, WORKER = "hubring.ps.cli", "hubring.workers.programs.ps_worker"


def start(cluster: Cluster, folder: Path, kind: str, *script: str) -> tuple[Program, list[Program]]:
    folder.mkdir()
    port, again = free_port(), ("--restarts", "3")
    saves = ["--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "0.5"]
    servers = [*again, "--once", "--workers", "2", "--port", str(port), *(saves if kind == "hub" else [])]
    workers = [*again, *FLAGS[kind], *(saves if kind == "ring" else [])]
    workers += ["--save-parameters", str(folder / "final.safetensors")]
    # On a fixed port, a server that starts again is found again.
    server = cluster.run(f"{folder.name}-server", SERVER, "start", *servers)
    address = f"127.0.0.1:{port}"
    pair = [
        cluster.worker(address, *workers, SMALL, str(STEPS), "16", *script, name=f"{folder.name}-{number}")
        for number in range(2)
    ]
    return server, pair


@pytest.mark.parametrize(("kind", "victim"), [("hub", "server"), ("ring", "server"), ("ring", "worker")])
def test_a_job_of_programs_that_restart_ends_in_the_same_bytes(
    cluster: Cluster, tmp_path: Path, kind: str, victim: str
) -> None:
    server, pair = start(cluster, tmp_path / "whole", kind)
    assert [program.wait() for program in (server, *pair)] == [0, 0, 0]
    go, folder = tmp_path / "go", tmp_path / "parted"
    server, pair = start(cluster, folder, kind, "pace", "0.02", "hold", str(go), str(STEPS - 5))
    saved = folder / "saved" if kind == "hub" else folder / "saved" / "workers"
    server.until(lambda: (newest_step(saved) or 0) >= 1, "checkpoint")
    lost, module = (server, SERVER) if victim == "server" else (pair[0], WORKER)
    (child,) = lost.children(module)
    os.kill(child, signal.SIGKILL)
    lost.until_said("it was killed by signal 9 (SIGKILL); restarting it in ")
    go.touch()
    assert [program.wait(200) for program in (server, *pair)] == [0, 0, 0]
    assert same(*(load_file(tmp_path / name / "final.safetensors") for name in ("whole", "parted")))
    assert "(2 left)" in lost.said()


def test_a_wrong_setting_is_not_restarted_and_a_signal_stops_for_good(cluster: Cluster) -> None:
    wrong = cluster.run("wrong", SERVER, "start", "--restarts", "3", "--host", "192.0.2.1", "--port", "0")
    assert wrong.wait() == 78
    assert "restarting" not in wrong.said()
    server, _ = cluster.server("--restarts", "3")
    server.process.send_signal(signal.SIGTERM)
    assert server.done(75)["checkpoint"] == ""
    assert "restarting" not in server.said()
