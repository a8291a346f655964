"""The batch script, run by bash with programs in the place of SLURM's."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.submit.slurm import render
from tests.support.submissions import NASTY, job

SRUN = """#!/bin/bash
compgen -e PS_ >> inherited
case "$*" in
  *"ps-server start"*)
    printf '%s\\0' "$@" > server.argv
    stat -c %a hubring-*.secrets > mode
    [ -z "$REFUSES" ] || exit 78
    while [ $# -gt 0 ]; do [ "$1" = --address-file ] && file=$2; shift; done
    echo node1:5555 > "$file"
    read -r < over
    echo '{"who": "server"}'
    exit "$SERVER_CODE" ;;
  *)
    printf '%s\\0' "$@" > worker.argv
    [ -n "$NOBODY_JOINS" ] || echo > over
    exit "$WORKERS_CODE" ;;
esac
"""
STUBS = {
    "srun": SRUN,
    "ps-server": '#!/bin/bash\nif [ -n "$NOBODY_JOINS" ]; then echo \'{"job": ""}\'; else exit 69; fi\n',
    "sleep": "#!/bin/bash\nexec /bin/sleep 0.02\n",
    "scancel": '#!/bin/bash\necho "$*" > scancel.said\necho > over\n',
    "scontrol": '#!/bin/bash\necho "$*" > scontrol.said\n',
}


@dataclass
class Ran:
    code: int
    out: str
    err: str
    folder: Path

    def argv(self, who: str) -> list[str]:
        return (self.folder / f"{who}.argv").read_text().split("\0")[:-1]

    def said(self, program: str) -> str:
        path = self.folder / f"{program}.said"
        return path.read_text().strip() if path.exists() else ""


def run(folder: Path, script: str, **variables: object) -> Ran:
    """Runs the script as SLURM would, in `folder`; the server ends when something is written into `over`."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in STUBS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    os.mkfifo(folder / "over")
    ours = {"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n0", "SERVER_CODE": "0", "WORKERS_CODE": "0"}
    ours |= {name: str(value) for name, value in variables.items()}
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={"PATH": path, **ours},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Ran(done.returncode, done.stdout, done.stderr, folder)


def script(*words: str, **flags: Any) -> str:
    return render(job(*words, **{"workers": 4, **flags}))


def directives(text: str) -> list[str]:
    """As sbatch reads them: up to the first line that is a command."""
    found = []
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            found.append(line.removeprefix("#SBATCH "))
        elif line.strip() and not line.startswith("#"):
            break
    return found


@pytest.mark.slow
def test_both_steps_get_what_the_user_said(tmp_path: Path) -> None:
    ran = run(
        tmp_path, script("train.py", *NASTY, shards=2, checkpoint_dir=Path("it's kept"), compress="int8")
    )
    assert (ran.code, ran.err) == (0, "")
    worker, server = ran.argv("worker"), ran.argv("server")
    assert worker[worker.index("ps-worker") :] == [
        *("ps-worker", "--server", "node1:5555", "--token-file", "hubring-42.secrets/tokens"),
        *("--compress", "int8", "--", "train.py"),
        *NASTY,
    ]
    assert server[server.index("--shards") :] == [
        *("--shards", "2", "--workers", "4", "--checkpoint-dir", "it's kept", "--once")
    ]
    assert server[server.index("--address-file") + 1] == "hubring-42.address"
    assert server[server.index("--token-file") + 1] == "hubring-42.secrets/tokens"
    assert (tmp_path / "mode").read_text() == "700\n"
    assert "--nodelist=n0" in server
    assert not (tmp_path / "injected").exists()


@pytest.mark.slow
def test_no_variable_of_the_submitter_beats_a_flag(tmp_path: Path) -> None:
    """sbatch passes them on; what counts of them is a flag by then."""
    text = script("train.py", mode="bsp", variables={"PS_MODE": "asp", "PS_COMPRESS": "int8"})
    ran = run(tmp_path, text, PS_MODE="asp", PS_COMPRESS="int8", PS_CONFIG="run.toml", PS_NODES=2, PS_GPUS=2)
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "inherited").read_text() == ""
    assert "--mode" not in ran.argv("server")
    assert "int8" in ran.argv("worker")


def test_no_argument_becomes_a_directive() -> None:
    plain = directives(script("train.py"))
    assert directives(script("train.py", *NASTY)) == plain
    assert plain == ["--job-name=hubring", "--ntasks=4", "--open-mode=append", "--signal=USR1@120"]


def test_settings_become_directives_and_more_may_follow() -> None:
    more = ["#SBATCH --account=physics", "#SBATCH --mem=8G"]
    text = script(
        "train.py",
        nodes=2,
        workers=None,
        gpus=2,
        cpus=4,
        memory=8,
        job_name="mine",
        time="0:02:00",
        partition="long,short",
        requeue=True,
        engine_option=more,
    )
    assert directives(text) == [
        *("--job-name=mine", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gpus-per-node=2"),
        *("--cpus-per-task=4", "--mem-per-cpu=2048M", "--time=0:02:00", "--partition=long,short"),
        *("--open-mode=append", "--signal=USR1@30", "--requeue", "--account=physics", "--mem=8G"),
    ]


@pytest.mark.parametrize(
    ("workers", "server", "code"), [(0, 0, 0), (137, 0, 0), (1, 1, 1), (1, 69, 69), (75, 75, 75), (0, 78, 78)]
)
@pytest.mark.slow
def test_the_job_ends_as_its_server_did(tmp_path: Path, workers: int, server: int, code: int) -> None:
    ran = run(tmp_path, script("train.py", requeue=True), WORKERS_CODE=workers, SERVER_CODE=server)
    assert ran.code == code
    assert json.loads(ran.out.splitlines()[-1]) == {"who": "server"}
    assert ran.said("scontrol") == ("requeue 42" if code == 75 else "")
    assert "restart" not in ran.err
    assert not list(tmp_path.glob("hubring-42.*"))


@pytest.mark.parametrize(
    ("server", "before", "again"),
    [(69, None, "1 of 2"), (137, 1, "2 of 2"), (75, 0, "1 of 2"), (69, 2, ""), (1, 0, ""), (78, 0, "")],
)
@pytest.mark.slow
def test_a_job_that_lost_a_process_is_requeued_a_few_times(
    tmp_path: Path, server: int, before: int | None, again: str
) -> None:
    text = script("train.py", restarts=2).replace("sleep $((", "echo pause $((")
    variables = {} if before is None else {"SLURM_RESTART_COUNT": before}
    ran = run(tmp_path, text, WORKERS_CODE=69, SERVER_CODE=server, **variables)
    assert ran.code == server
    assert ran.said("scontrol") == ("requeue 42" if again else "")
    assert (f"exit code {server}: restart {again}" in ran.err) is bool(again)
    assert (f"pause {2 ** (before or 0)}\n" in ran.out) is bool(again)


@pytest.mark.slow
def test_nothing_is_requeued_unasked(tmp_path: Path) -> None:
    ran = run(tmp_path, script("train.py"), WORKERS_CODE=75, SERVER_CODE=75)
    assert (ran.code, ran.said("scontrol")) == (75, "")


@pytest.mark.slow
def test_a_server_to_which_no_worker_came_is_told_to_stop(tmp_path: Path) -> None:
    ran = run(tmp_path, script("nowhere.py"), WORKERS_CODE=2, SERVER_CODE=75, NOBODY_JOINS=1)
    assert (ran.code, ran.said("scancel")) == (2, "--signal=TERM 42")


@pytest.mark.slow
def test_a_server_that_does_not_start_ends_the_job_with_its_code_and_a_sentence(tmp_path: Path) -> None:
    ran = run(tmp_path, script("train.py"), REFUSES=1)
    assert ran.code == 78
    assert f"no address of ps-server in {tmp_path}/hubring-42.address" in ran.err
    assert not (tmp_path / "worker.argv").exists()


@pytest.mark.slow
def test_srun_gets_the_cores_of_a_task(tmp_path: Path) -> None:
    text = script("train.py").replace("end $code", 'echo "$SRUN_CPUS_PER_TASK"; end $code')
    assert run(tmp_path, text, SLURM_CPUS_PER_TASK=3).out.splitlines()[-1] == "3"
