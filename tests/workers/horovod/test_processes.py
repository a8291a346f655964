"""Unedited Horovod scripts on real workers, by ps-worker and by ps-run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock

import pytest

from hubring.workers.horovod.runner.run import run
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.process_tree import GRACE, descendants, ends_by

PUBLISHED = str(Path(__file__).with_name("published.py"))

pytestmark = pytest.mark.slow


def final_loss(said: str) -> float:
    match = re.search(r"final loss (\d+\.\d+) on 2 ranks, 2 here", said)
    assert match, said
    return float(match[1])


@pytest.mark.timeout(300)
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
    return cluster.run(name, "hubring.workers.programs.ps_run", *arguments)


@pytest.mark.full
def test_init_can_be_called_again_after_a_process_set_was_refused(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "sets.py"
    script.write_text(
        "import horovod.torch as hvd\n"
        "def told(sets):\n"
        "    try:\n"
        "        hvd.init(process_sets=sets)\n"
        "    except ValueError as error:\n"
        "        return str(error)\n"
        "first, other = hvd.ProcessSet([0]), hvd.ProcessSet([1])\n"
        "assert 'duplicate' in told([first, hvd.ProcessSet([0])])\n"
        "assert not hvd.is_initialized() and first.size() is None\n"
        "assert told([first]) is None and first.size() == 1\n"
        "assert told([first]) is None and told('dynamic') is None and told(None) is None\n"
        "assert 'init was called before' in told([first, other])\n"
        "assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1], 1: [0]}\n"
        "print('done')\n"
    )
    program = ps_run(cluster, "-np", "2", str(script))
    assert program.wait() == 0, program.said()
    assert program.out.read_text().count("done") == 2


@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_ps_run_starts_all_and_marks_what_they_say(cluster: Cluster, tmp_path: Path, topology: str) -> None:
    trace, outputs = tmp_path / "trace.json", tmp_path / "outputs"
    program = ps_run(
        cluster,
        *("-np", "2", "-H", "localhost:2", "--topology", topology, "--output-filename", str(outputs)),
        *("--gloo", "--mpi", "--cycle-time-ms", "3.5", "--network-interface", "lo", "--disable-cache"),
        *("--fusion-threshold-mb", "1", "--timeline-filename", str(trace), "python", PUBLISHED),
        *("--checkpoint", str(tmp_path / "c.pt"), "--fp16-allreduce"),
    )
    assert program.wait() == 0, program.said()
    lines = program.out.read_text().splitlines()
    assert all(re.match(r"\[[01]\]<stdout>:", line) for line in lines)
    assert final_loss(program.out.read_text())
    assert "--gloo, --mpi: no effect" in program.said()
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
    assert "rank 1 exited with 7" in program.said()


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
    script, outputs = tmp_path / "calls.py", tmp_path / "outputs"
    script.write_text(  # a function within a function, and no guard: what workers get is the function alone
        "import horovod\n"
        "def calls():\n"
        "    def total(start, step):\n"
        "        import torch\n"
        "        import horovod.torch as hvd\n"
        "        hvd.init()\n"
        "        print('rank', hvd.rank(), flush=True)\n"
        "        mine = torch.tensor(start + step * hvd.rank())\n"
        "        return hvd.allreduce(mine, op=hvd.Sum).item(), hvd.rank()\n"
        "    return total\n"
        f"print(horovod.run(calls(), (1.0,), {{'step': 2.0}}, 2, output_filename={str(outputs)!r}))\n"
    )
    program = cluster.run("alone", "hubring.workers.programs.ps_worker", "--as-horovod", str(script))
    assert program.wait() == 0, program.said()
    assert "[(4.0, 0), (4.0, 1)]" in program.out.read_text()
    assert "rank 1" in (outputs / "rank.1" / "stdout").read_text()


@pytest.mark.full
def test_a_function_that_does_not_call_init_knows_its_rank_and_the_server_is_not_waited_for() -> None:
    def rank_and_size() -> tuple[str, str]:
        import os

        return os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]

    before = descendants()
    assert run(rank_and_size, num_proc=2, hosts="localhost:1,127.0.0.1:1") == [("0", "2"), ("1", "2")]
    assert descendants() == before


CALLER = """
import sys
from hubring.workers.localrun.functions import _Caller
def waits():
    import os, time
    os.write(1, b"here\\n")
    time.sleep(600)
caller = _Caller(0, sys.executable, None)
caller.ask({}, (waits, (), {}))
print(caller.pid, flush=True)
caller.wait()
"""


def test_workers_of_horovod_run_end_with_the_caller() -> None:
    with subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        said = {caller.stdout.readline().strip(), caller.stdout.readline().strip()}
        assert "here" in said
        caller.kill()
        (worker,) = said - {"here"}
        assert ends_by(int(worker), time.monotonic() + GRACE)


def test_a_call_that_cannot_be_sent_leaves_no_worker() -> None:
    before = descendants()
    with pytest.raises(TypeError, match="pickle"):
        run(Lock().acquire, num_proc=2)
    assert descendants() == before


def test_workers_of_ps_run_know_who_started_them(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import json, subprocess, sys\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"  # or the server waits for somebody to come
        "command = [sys.executable, '-m', 'hubring.workers.programs.ps_worker', 'env', '--json']\n"
        "said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)\n"
        "print(said['launcher']['value'], said['rank']['value'], said['world size']['value'])\n"
    )
    program = ps_run(cluster, "-np", "1", str(script))
    assert program.wait() == 0, program.said()
    assert "[0]<stdout>:ps-run 0 1" in program.out.read_text()


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_a_lost_worker_is_started_anew_and_let_in(cluster: Cluster, tmp_path: Path, topology: str) -> None:
    mark = tmp_path / "killed"
    script = tmp_path / "elastic.py"
    script.write_text(
        "import os, pathlib, signal, time, torch\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "state = hvd.elastic.TorchState(step=0, sizes=[])\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    state.sizes = [*state.sizes, hvd.size()]\n"
        "    while len(state.sizes) < 3:\n"
        "        if hvd.rank() == 0 and state.step == 2 and not mark.exists():\n"
        "            mark.touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        hvd.allreduce(torch.ones(1), name='step')\n"
        "        state.step += 1\n"
        "        time.sleep(0.05)\n"
        "        state.commit()\n"
        "    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()\n"
        "print('all', train(state), state.sizes)\n"
    )
    program = ps_run(cluster, "-np", "2", "--min-num-proc", "1", "--topology", topology, str(script))
    assert program.wait() == 0, program.said()
    assert "rank 0 was killed by signal 9 (SIGKILL); restarting it" in program.said()
    assert program.out.read_text().count("all 2.0 [2, 1, 2]") == 2
