"""Unedited Horovod scripts on real workers, by ps-worker and by ps-run."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster import Cluster, Program

PUBLISHED = str(Path(__file__).with_name("published.py"))

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    started = Cluster(tmp_path)
    yield started
    started.end()


def final_loss(said: str) -> float:
    match = re.search(r"final loss (\d+\.\d+) on 2 ranks, 2 here", said)
    assert match, said
    return float(match[1])


def test_an_unedited_script_ends_in_the_same_loss_on_hub_and_ring(cluster: Cluster, tmp_path: Path) -> None:
    losses = {}
    for topology in ("hub", "ring"):
        server, address = cluster.server("--workers", "2", "--once", name=f"server-{topology}")
        flags = ["--as-horovod", "--topology", topology, PUBLISHED]
        flags += ["--checkpoint", str(tmp_path / f"{topology}.pt"), "--gradient-clip", "1.0"]
        workers = [cluster.worker(address, *flags, name=f"{topology}{rank}") for rank in range(2)]
        for worker in workers:
            assert worker.done()["steps"] == 18
        server.done()
        losses[topology] = final_loss("".join(worker.out.read_text() for worker in workers))
        assert (tmp_path / f"{topology}.pt").exists()
    assert losses["hub"] == pytest.approx(losses["ring"], abs=2e-6)


def ps_run(cluster: Cluster, *arguments: str, name: str = "run") -> Program:
    return cluster.run(name, "workers.launcher.cli", *arguments)


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_ps_run_starts_all_and_marks_what_they_say(cluster: Cluster, tmp_path: Path, topology: str) -> None:
    trace, outputs = tmp_path / "trace.json", tmp_path / "outputs"
    program = ps_run(
        cluster,
        *("-np", "2", "-H", "localhost:2", "--topology", topology, "--output-filename", str(outputs)),
        *("--timeline-filename", str(trace), "python", PUBLISHED),
        *("--checkpoint", str(tmp_path / "c.pt"), "--fp16-allreduce"),
    )
    assert program.wait() == 0, program.said()
    lines = program.out.read_text().splitlines()
    assert all(re.match(r"\[[01]\]<stdout>:", line) for line in lines)
    assert final_loss(program.out.read_text())
    assert "final loss" in (outputs / "rank.0" / "stdout").read_text()
    assert (outputs / "rank.1" / "stderr").exists()
    assert "allreduce.avg_loss" in {
        event.get("args", {}).get("tensor") for event in json.loads(trace.read_text())
    }


def test_the_first_failure_ends_all_and_is_the_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import horovod.torch as hvd, torch, sys\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: sys.exit(7)\n"
        "hvd.allreduce(torch.ones(1))\n"
        "import time\n"
        "time.sleep(600)\n"
    )
    program = ps_run(cluster, "-np", "2", str(script))
    assert program.wait() == 7, program.said()
    assert "rank 1 ended with exit code 7" in program.said()


def test_a_signal_reaches_the_workers(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import horovod.torch as hvd, time\nhvd.init()\nprint('here', flush=True)\ntime.sleep(600)\n"
    )
    program = ps_run(cluster, "-np", "2", str(script))
    program.until(lambda: program.out.read_text().count("here") == 2, "start of both")
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 75, program.said()


def test_another_machine_is_refused_with_the_way_to_go(cluster: Cluster) -> None:
    program = ps_run(cluster, "-np", "2", "-H", "node1:1,node2:1", PUBLISHED)
    assert program.wait() == 2
    assert "another machine" in program.said()
    assert "srun, torchrun, mpirun" in program.said()


def test_horovod_run_returns_what_each_rank_returned(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import torch\n"
        "import horovod.torch as hvd\n"
        "def total(start, step):\n"
        "    hvd.init()\n"
        "    return hvd.allreduce(torch.tensor(start + step * hvd.rank()), op=hvd.Sum).item(), hvd.rank()\n"
    )
    script = tmp_path / "calls.py"
    script.write_text(
        "import horovod, task\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(task.total, args=(1.0,), kwargs={'step': 2.0}, num_proc=2))\n"
    )
    program = cluster.run("alone", "workers.cli", "--as-horovod", str(script))
    assert program.wait() == 0, program.said()
    assert "[(4.0, 0), (4.0, 1)]" in program.out.read_text()
