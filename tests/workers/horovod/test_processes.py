"""Unedited Horovod scripts on real workers, by ps-worker and by ps-run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock

import pytest

from hubring.workers.horovod.run_function import run
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.process_tree import GRACE, descendants, ends_by, entry

PUBLISHED = str(Path(__file__).with_name("published.py"))

pytestmark = pytest.mark.slow


def final_loss(said: str) -> float:
    match = re.search(r"final loss (\d+\.\d+) on 2 ranks, 2 here", said)
    assert match, said
    return float(match[1])


def ps_run(cluster: Cluster, *arguments: str, code: int = 0) -> Program:
    """A job that has ended with this exit code."""
    program = cluster.run("run", "hubring.workers.programs.ps_run", "-np", "2", *arguments)
    assert program.wait() == code, program.said()
    return program


def written(folder: Path, script: str) -> str:
    file = folder / "script.py"
    file.write_text(script)
    return str(file)


def programs_beside(others: set[int]) -> list[int]:
    """Returns the programs that run: not their fork servers, which have no names and end just after them."""
    return [pid for pid in descendants() - others if entry(pid, "comm").startswith("hubring")]


@pytest.mark.timeout(300)
def test_an_unedited_script_ends_in_the_same_loss_by_ps_worker_on_a_hub_and_by_ps_run_on_a_ring(
    cluster: Cluster, tmp_path: Path
) -> None:
    server, address = cluster.server("--workers", "2", "--once")
    script = [PUBLISHED, "--checkpoint", str(tmp_path / "checkpoint.pt"), "--gradient-clip", "1.0"]
    workers = [cluster.worker(address, "--as-horovod", *script, name=f"hub{rank}") for rank in range(2)]
    assert [worker.done()["steps"] for worker in workers] == [18, 18]
    server.done()
    on_hub = final_loss("".join(worker.out.read_text() for worker in workers))
    assert (tmp_path / "checkpoint.pt").exists()

    trace, outputs = tmp_path / "trace.json", tmp_path / "outputs"
    program = ps_run(
        cluster,
        *("-H", "localhost:2", "--topology", "ring", "--output-filename", str(outputs)),
        *("--gloo", "--mpi", "--cycle-time-ms", "3.5", "--network-interface", "lo", "--disable-cache"),
        *("--fusion-threshold-mb", "1", "--timeline-filename", str(trace), "python", *script),
    )
    lines = program.out.read_text().splitlines()
    assert all(re.match(r"\[[01]\]<stdout>:", line) for line in lines)
    assert final_loss(program.out.read_text()) == pytest.approx(on_hub, abs=2e-6)
    assert "--gloo, --mpi: no effect" in program.said()
    assert "final loss" in (outputs / "rank.0" / "stdout").read_text()
    assert (outputs / "rank.1" / "stderr").exists()
    traced = {(event["name"], event.get("args", {}).get("tensor")) for event in json.loads(trace.read_text())}
    assert {(name, "allreduce.avg_loss") for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")} <= traced


def test_a_plain_python_process_takes_its_place_from_mpiruns_variables(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = written(
        tmp_path,
        "import hubring, hubring.horovod as hvd, torch\n"
        "hvd.init()\n"
        "ranks = hvd.allgather(torch.tensor([hvd.rank()]), name='ranks').tolist()\n"
        "print(hubring.rank(), hubring.size(), hvd.rank(), hvd.size(), hvd.local_rank(), ranks)\n",
    )
    server, address = cluster.server("--workers", "2", "--once")
    programs = []
    for rank in (1, 0):
        place = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        variables = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in place.items()}
        variables["PS_SERVER"] = address
        programs.append(cluster.start(f"plain{rank}", [sys.executable, script], variables))
    for rank, program in zip((1, 0), programs, strict=True):
        assert program.wait() == 0, program.said()
        assert program.out.read_text() == f"{rank} 2 {rank} 2 {rank} [0, 1]\n"
    assert server.done()["finished"] == [0, 1]


@pytest.mark.full
def test_workers_know_who_started_them_and_the_first_failure_ends_all(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = written(
        tmp_path,
        "import json, subprocess, sys\n"
        "import horovod.torch as hvd, torch\n"
        "hvd.init()\n"
        "command = [sys.executable, '-m', 'hubring.workers.programs.ps_worker', 'env', '--json']\n"
        "said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)\n"
        "print(said['launcher']['value'], said['rank']['value'], said['world size']['value'], flush=True)\n"
        "hvd.barrier()\n"
        "if hvd.rank() == 1: sys.exit(7)\n"
        "hvd.allreduce(torch.ones(1))\n",
    )
    program = ps_run(cluster, script, code=7)
    assert "rank 1 exited with 7" in program.said()
    assert "[1]<stdout>:ps-run 1 2" in program.out.read_text()


@pytest.mark.full
def test_init_can_be_called_again_after_a_process_set_was_refused(cluster: Cluster, tmp_path: Path) -> None:
    script = written(
        tmp_path,
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
        "print('done')\n",
    )
    assert ps_run(cluster, script).out.read_text().count("done") == 2


def test_horovod_run_returns_what_each_rank_returned(cluster: Cluster, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    script = written(  # a function within a function, and no guard: what workers get is the function alone
        tmp_path,
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
        f"print(horovod.run(calls(), (1.0,), {{'step': 2.0}}, 2, output_filename={str(outputs)!r}))\n",
    )
    program = cluster.run("alone", "hubring.workers.programs.ps_worker", "--as-horovod", script)
    assert program.wait() == 0, program.said()
    assert "[(4.0, 0), (4.0, 1)]" in program.out.read_text()
    assert "rank 1" in (outputs / "rank.1" / "stdout").read_text()


@pytest.mark.full
@pytest.mark.usefixtures("forked_pythons")
def test_a_function_that_does_not_call_init_knows_its_rank_and_the_server_is_not_waited_for() -> None:
    def rank_and_size() -> tuple[str, str]:
        import os

        return os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]

    before = descendants()
    assert run(rank_and_size, num_proc=2, hosts="localhost:1,127.0.0.1:1") == [("0", "2"), ("1", "2")]
    assert not programs_beside(before)


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


@pytest.mark.usefixtures("forked_pythons")
def test_workers_of_horovod_run_end_with_the_caller() -> None:
    with subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        said = {caller.stdout.readline().strip(), caller.stdout.readline().strip()}
        assert "here" in said
        caller.kill()
        (worker,) = said - {"here"}
        assert ends_by(int(worker), time.monotonic() + GRACE)


@pytest.mark.usefixtures("forked_pythons")
def test_a_call_that_cannot_be_sent_leaves_no_worker() -> None:
    before = descendants()
    with pytest.raises(TypeError, match="pickle"):
        run(Lock().acquire, num_proc=2)
    assert not programs_beside(before)


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_a_lost_worker_is_started_anew_and_let_in(cluster: Cluster, tmp_path: Path, topology: str) -> None:
    mark = tmp_path / "killed"
    script = written(
        tmp_path,
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
        "print('all', train(state), state.sizes)\n",
    )
    program = ps_run(cluster, "--min-num-proc", "1", "--topology", topology, script)
    assert "rank 0 was killed by signal 9 (SIGKILL); restarting it" in program.said()
    assert program.out.read_text().count("all 2.0 [2, 1, 2]") == 2


# import hubring.horovod.as_horovod


def python(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, written(folder, script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)


@pytest.mark.usefixtures("forked_pythons")
def test_horovod_is_found_once_it_is_asked_for_and_not_before(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        "import importlib.util, sys\n"
        "import hubring.horovod\n"
        "finders = list(sys.meta_path)\n"
        "before = importlib.util.find_spec('horovod')\n"
        "import hubring.horovod.as_horovod\n"
        "import horovod, horovod.torch as hvd\n"
        "from horovod.torch.mpi_ops import Average\n"
        "print(before, len(sys.meta_path) - len(finders), hvd.allreduce is hubring.horovod.allreduce)\n",
    )
    assert done.stdout == "None 1 True\n", done.stderr


@pytest.mark.usefixtures("forked_pythons")
def test_after_horovod_itself_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").touch()
    done = python(tmp_path, "import horovod\nimport hubring.horovod.as_horovod\n")
    assert done.returncode == 1
    assert f"horovod was imported from {tmp_path / 'horovod.py'} before" in done.stderr
