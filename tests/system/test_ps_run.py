"""ps-run as people use it: in a pipe, at a terminal, with settings, and stopped."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from hubring.ps.process.launch import module_command
from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.process_tree import GRACE, ends_by

pytestmark = pytest.mark.slow

PS_RUN = "hubring.workers.programs.ps_run"
PS_WORKER = "hubring.workers.programs.ps_worker"
TEAM = """
import signal, sys
from hubring.ps.config.environment import environment
from hubring.ps.process.child import passing_on
from hubring.workers.localrun import team
team.QUIT_SECONDS = 0.2
commands = [(sys.executable, "-c", code) for code in sys.argv[1:]]
job = team.LocalTeam(commands, [environment()] * len(commands))
with passing_on([signal.SIGTERM], job.signal):
    sys.exit(job.run(print))
"""
ASK = "import sys; print('got', input('Name? ')); print(repr(sys.stdin.read()))"


def team(*code: str) -> list[str]:
    """The command line of a program that runs one worker for each piece of code."""
    return [sys.executable, "-c", TEAM, *code]


@contextmanager
def piped(command: Sequence[str], **files: Any) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A program and its output."""
    files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **files}
    with subprocess.Popen(command, **files) as program:
        assert program.stdout is not None
        yield program, program.stdout


@pytest.mark.parametrize(
    ("line", "found"), [("ps-run --topol", "--topology"), ("ps-run --topology ''", "hub ring")]
)
def test_bash_completes_flags_and_their_choices(line: str, found: str) -> None:
    code = (
        f'eval "$(_PS_RUN_COMPLETE=source_bash ps-run)"; COMP_WORDS=({line});'
        " COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _ps_run_completion ps-run; echo ${COMPREPLY[@]}"
    )
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{found}\n"


def test_a_pipe_that_closes_ends_the_workers_without_a_word() -> None:
    endless = "while True: print('line')"
    with piped(team(endless, endless), stderr=subprocess.PIPE) as (program, output):
        assert program.stderr is not None
        assert b"stdout>:line" in output.readline()
        output.close()
        assert program.wait() == 128 + signal.SIGPIPE
        assert program.stderr.read() == b""


@pytest.mark.full
@pytest.mark.usefixtures("forked_pythons")
def test_a_reader_of_the_first_line_ends_ps_run_too(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text("while True: print('line')\n")
    command = module_command(PS_RUN, "-n", "1", str(script))
    with piped(command, stderr=subprocess.STDOUT) as (program, output):
        assert b"ps-run: starting 1 server" in output.readline()
        output.close()
        assert program.wait() == 128 + signal.SIGPIPE


def test_a_full_disk_is_named() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(team("print('line')"), stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == os.EX_IOERR
    assert b"the output cannot be written: [Errno 28] No space left on device" in ended.stderr


def test_rank_0_alone_reads_a_pipe_to_its_end() -> None:
    other = "import sys; print(repr(sys.stdin.read()))"
    ended = subprocess.run(team(ASK, other), input=b"me\nmore\n", capture_output=True, check=True)
    assert sorted(ended.stdout.splitlines()) == [
        b"[0]<stdout>:'more\\n'",
        b"[0]<stdout>:Name? got me",
        b"[1]<stdout>:''",
    ]


@pytest.mark.parametrize("controlling", [False, True])
def test_rank_0_reads_the_terminal(controlling: bool) -> None:
    controller, terminal = pty.openpty()
    take = "import os, fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY); os.execv({0!r}, {1!r})"
    command = team(ASK)
    if controlling:
        command = [sys.executable, "-c", take.format(command[0], command)]
    with (
        piped(command, stdin=terminal, start_new_session=True) as (program, output),
        os.fdopen(controller, "wb", buffering=0) as keyboard,
    ):
        os.close(terminal)
        prompt = b"[0]<stdout>:Name? "
        assert output.read(len(prompt)) == prompt
        keyboard.write(b"me\n")
        assert output.readline() == b"got me\n"
        keyboard.write(b"rest\n\x04")
        assert output.read() == b"[0]<stdout>:'rest\\n'\n"
        assert program.wait() == 0


@pytest.mark.parametrize("prints", [False, True])
def test_a_terminal_shows_the_progress_of_a_script_that_prints_nothing(tmp_path: Path, prints: bool) -> None:
    script = tmp_path / "script.py"
    loop = "optimizer.zero_grad()"
    shown = "hubring.report(samples=8, total_steps=steps)" + "; print('mine', step)" * prints
    script.write_text(Path(SMALL).read_text().replace(loop, f"{loop}; {shown}"))
    words = ("-n", "1", "--output-filename", str(tmp_path), str(script), "24", "pace", "0.3")
    controller, terminal = pty.openpty()
    with piped(module_command(PS_RUN, *words), stderr=terminal) as (program, output):
        os.close(terminal)
        output.read()
        said = b""
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(controller, 1 << 16):
                said += chunk
        assert program.wait() == 0, said
    os.close(controller)
    line = rb"\r\[0\] step \d+ of 24, [\d.]+ samples/s, loss [\d.]+, 0:00:\d+ left\x1b\[K"
    assert bool(re.search(line, said)) is not prints, said
    assert b"\r\nps-run: 1 worker finished 24 steps" in said
    assert "samples/s" not in "".join(file.read_text() for file in tmp_path.glob("rank.0/*"))


def test_the_second_signal_ends_workers_that_do_not_listen() -> None:
    say = "lambda *_: print('here', flush=True)"
    deaf = f"import signal, time; say = {say}; signal.signal(15, say); say(); time.sleep(600)"
    with piped(team(deaf)) as (program, output):
        for _ in range(2):
            assert b"here" in output.readline()  # two signals at once would be one
            program.send_signal(signal.SIGTERM)
        assert program.wait() == 128 + signal.SIGTERM


@pytest.mark.full
def test_after_a_signal_each_worker_may_finish_what_it_has_to_save() -> None:
    ends = "import signal, time; print('here', flush=True); signal.sigwait([15]); raise SystemExit(75)"
    saves = ends.replace("raise", "time.sleep(1); print('saved'); signal.sigpending() and exit(1); raise")
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); "
    with piped(team(block + ends, block + saves)) as (program, output):
        assert b"here" in output.readline()
        assert b"here" in output.readline()
        program.send_signal(signal.SIGTERM)
        assert output.read() == b"[1]<stdout>:saved\n"
        assert program.wait() == 75


def ps_run(cluster: Cluster, *arguments: str) -> Program:
    return cluster.run("run", PS_RUN, *arguments)


def test_settings_reach_both_sides_and_a_summary_ends_the_run(cluster: Cluster) -> None:
    settings = ("--mode", "ssp", "--staleness", "2", "--compress", "int8", "--lease", "30", "--page")
    program = ps_run(cluster, "-n", "2", *settings, SMALL, "8", "16")
    assert program.wait() == 0, program.said()
    first, *said = program.said().splitlines()
    assert first == "ps-run: starting 1 server, 2 workers (hub, ssp)"
    assert any(line.startswith("ps-run: status page: http://127.0.0.1:") for line in said)
    assert said[-1].startswith("ps-run: 2 workers finished 8 steps in ")
    assert '"exit_code"' not in program.out.read_text()


TRAINED = "for _ in range(2): torch.optim.SGD(model.parameters()).step()\nprint(model.module.weight.grad"
DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group('gloo')
model = DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
print(model.module.weight.grad.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["ps-run", "ps-worker"])
def test_a_ddp_script_that_does_not_know_hubring_is_trained_as_it_is(
    cluster: Cluster, tmp_path: Path, launcher: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DDP)
    if launcher == "ps-run":
        program = ps_run(cluster, "-n", "2", str(script))
    else:
        _, address = cluster.server("--workers", "2")
        flags = ("--server", address, "--gpus", "2", "--accelerator", "cpu")
        program = cluster.run("workers", PS_WORKER, *flags, str(script))
    assert program.wait() == 0, program.said()
    assert program.out.read_text().count("[[0.5, 0.5]]") == 2
    if launcher == "ps-run":
        assert program.said().count("Hubring took no part: the script never called hubring.init()") == 1
        assert "did not join" not in program.said()


@pytest.mark.parametrize(
    ("topology", "asked", "backend"),
    [
        ("hub", "dist.init_process_group('gloo')", "hubring"),
        ("hub", "dist.device_mesh.init_device_mesh('cpu', (2,))", "hubring"),
        ("ring", "dist.init_process_group('gloo')", "gloo"),
    ],
)
def test_a_ddp_script_that_asks_for_gloo_or_nothing_trains_on_the_hub(
    cluster: Cluster, tmp_path: Path, topology: str, asked: str, backend: str
) -> None:
    script = tmp_path / "script.py"
    used = "print(dist.get_backend(), dist.get_backend(dist.new_group(backend='gloo')))\n"
    trains = DDP.replace("print(model.module.weight.grad", TRAINED)
    script.write_text(trains.replace("dist.init_process_group('gloo')\n", f"{asked}\n{used}"))
    program = ps_run(cluster, "-n", "2", "--as-gloo", "--topology", topology, str(script))
    assert program.wait() == 0, program.said()
    assert program.out.read_text().count("[[0.5, 0.5]]") == 2
    assert program.out.read_text().count(f"{backend} {backend}") == 2
    assert ("Hubring took no part" in program.said()) == (topology == "ring")
    assert ("2 workers finished 2 steps" in program.said()) == (topology == "hub")
    assert f"starting 1 server, 2 workers ({topology})\n" in program.said()


@pytest.mark.parametrize("setting", ["--mode asp", "--compress int8"])
def test_settings_that_a_scripts_own_optimizer_does_not_follow_are_refused(
    cluster: Cluster, tmp_path: Path, setting: str
) -> None:
    (script := tmp_path / "script.py").write_text(DDP)
    program = ps_run(cluster, "-n", "2", "--as-gloo", *setting.split(), str(script))
    assert program.wait() == 78, program.said()
    assert f"{setting} has no effect on groups of torch.distributed" in program.said()


def test_a_backend_that_is_asked_for_by_name_stays(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    program = ps_run(cluster, "-n", "2", "--as-gloo", str(script))
    assert program.wait() == 1, program.said()
    assert program.said().count("the script asks for the backend nccl by name, so the hub takes no part") == 1


def test_a_ddp_model_in_our_optimizer_is_an_error_of_one_line(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    wrapped = "import hubring\nhubring.init()\nours = hubring.DistributedOptimizer(torch.optim.SGD("
    script.write_text(DDP.replace("model(", f"{wrapped}model.parameters()), model)\nmodel(", 1))
    program = ps_run(cluster, "-n", "2", str(script))
    assert program.wait() == 78, program.said()
    first = re.search(r"rank (\d) exited with 78", program.said())
    assert first is not None
    said = [line for line in program.said().splitlines() if line.startswith(f"[{first[1]}]")]
    lines = [line for line in said if f" w{first[1]} | " not in line]
    assert len(lines) == 1, lines
    assert "leave DistributedOptimizer out, and run the script with --as-gloo" in lines[0]


@pytest.mark.full
def test_workers_that_step_save_and_a_folder_that_nobody_writes_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(Path(SMALL).read_text().replace("hubring.init()", "hubring.init(aggregate=True)"))
    program = ps_run(cluster, "-n", "2", "--checkpoint-dir", str(tmp_path / "saved"), str(script), "3", "16")
    assert program.wait() == 0, program.said()
    assert [*tmp_path.glob("saved/workers/*-step-3")]
    _, address = cluster.server("--workers", "1", "--once", "--checkpoint-dir", str(tmp_path / "other"))
    worker = cluster.worker(address, str(script), "3", "16")
    assert worker.done()["steps"] == 3
    assert "--checkpoint-dir has no effect, because the workers step" in worker.said()


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_ends_a_start_too(number: signal.Signals, code: int) -> None:
    command = module_command(PS_RUN, "-n", "1", SMALL, "1000000", "16")
    with piped(command, stderr=subprocess.STDOUT) as (program, output):
        assert b"ps-run: starting 1 server" in output.readline()
        program.send_signal(number)
        said = output.read()
        assert program.wait() == code, said
        assert b"Traceback" not in said


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "ending"),
    [
        (signal.SIGINT, 130, "interrupted after"),
        (signal.SIGTERM, 75, "stopped on request after"),
        (signal.SIGUSR1, 75, "stopped on request after"),
    ],
)
def test_a_signal_is_one_wish_of_all_workers(
    cluster: Cluster, number: signal.Signals, code: int, ending: str
) -> None:
    program = ps_run(cluster, "-n", "2", SMALL, "60", "16", "hold", str(cluster.go), "20")
    program.until(lambda: program.said().count("holding at 20") == 2, "hold")
    program.process.send_signal(number)
    notice = f"{number.name}: all workers stop after the same step"
    program.until(lambda: program.said().count(notice) == 2, "notice")
    cluster.go.touch()
    assert program.wait() == code, program.said()
    assert f"ps-run: {ending}" in program.said().splitlines()[-1]


def test_a_resumed_job_names_its_checkpoint_and_counts_its_own_steps(
    cluster: Cluster, tmp_path: Path
) -> None:
    flags = ("-n", "1", "--checkpoint-dir", str(tmp_path), SMALL)
    assert ps_run(cluster, *flags, "5").wait() == 0
    program = ps_run(cluster, *flags, "8")
    assert program.wait() == 0, program.said()
    (folder,) = tmp_path.glob("*-step-5")
    resuming = f"ps-run: resuming at step 5 from {folder}, saved "
    assert any(line.startswith(resuming) and line.endswith(" ago") for line in program.said().splitlines())
    assert "1 worker finished 3 steps (to step 8) in " in program.said().splitlines()[-1]


@pytest.mark.full
def test_workers_end_with_ps_run(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n")
    program = ps_run(cluster, "-n", "1", str(script))
    program.until(lambda: "pid" in program.out.read_text(), "start")
    program.process.kill()
    assert ends_by(int(program.out.read_text().split()[-1]), time.monotonic() + GRACE)


@pytest.mark.full
@pytest.mark.usefixtures("forked_pythons")
def test_a_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "part.py").write_text("value = 5\n")
    (package / "mod.py").write_text(
        "import sys, warnings\n"
        "from .part import value\n"
        "import hubring\n"
        "hubring.init()\n"
        "warnings.warn('unheard')\n"
        "print(value, __name__, __package__, sys.argv, sys.flags.dev_mode)\n"
    )
    words = ("-n", "1", "python", "-W", "ignore", "-X", "dev", "-m", "pkg.mod", "-x", "--topology")
    command = module_command(PS_RUN, *words)
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    said = f"5 __main__ pkg {[str(package / 'mod.py'), '-x', '--topology']} True"
    assert ended.stdout == f"[0]<stdout>:{said}\n"
    assert "unheard" not in ended.stderr
    assert "ps-run: --topology stands after the script, which gets it" in ended.stderr


@pytest.mark.parametrize(
    "program",
    [[PS_RUN, SMALL], ["hubring.ps.cli", "start", "--port", "0"], [PS_WORKER, SMALL]],
    ids=["ps-run", "ps-server", "ps-worker"],
)
def test_a_wrong_variable_ends_every_program_of_a_job_with_78(
    cluster: Cluster, program: Sequence[str]
) -> None:
    started = cluster.run("program", *program, variables={"PS_MODE": "async"})
    assert started.wait() == 78, started.said()
    assert "PS_MODE='async' in the environment: expected one of bsp, asp, ssp, backup" in started.said()


@pytest.mark.parametrize("module", [PS_RUN, "hubring.ps.cli", PS_WORKER, "hubring.workers.compare.cli"])
def test_every_program_has_a_version(cluster: Cluster, module: str) -> None:
    program = cluster.run("version", module, "--version")
    assert program.wait() == 0, program.said()
    assert program.out.read_text().startswith("Hubring ")
