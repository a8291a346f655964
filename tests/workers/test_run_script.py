"""How a script ends under ps-worker, and in a plain `python train.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.observe.logs import LogOrigin
from hubring.ps.process.launch import module_command
from hubring.workers.run_script import ScriptOutcome, train
from hubring.workers.runtime import context
from tests.workers.scripts import PLAIN, TRAIN, started

Run = Callable[..., ScriptOutcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a script in this process, alone, as ps-worker does; what it changes is put back."""
    for name, value in {"argv": [*sys.argv], "path": [*sys.path], "excepthook": sys.excepthook}.items():
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(threading, "_threading_atexits", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(context, "_result", {})
    monkeypatch.setattr(context, "_prepared", None)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def start(script: str, *arguments: str, **settings: Any) -> ScriptOutcome:
        file = tmp_path / "script.py"
        file.write_text(script)
        return train(WorkerConfig(**settings), LogOrigin(), "", "", [file.name, *arguments])

    yield start
    context.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


LOST = "\nwith torch.no_grad(): model.weight[0, 1] = float('nan')"
LIGHTNING = "LightningEnvironment"
NAN = "\nhubring.report(loss=float('nan'))"


def test_a_report_of_nan_ends_a_training_whose_parameters_are_lost(run: Run) -> None:
    outcome = run(TRAIN + LOST + NAN)
    assert outcome.code == 1
    assert "parameter weight [1, 2] holds nan after step 1" in outcome.error
    assert outcome.traceback == ""


@pytest.mark.parametrize("harmless", [NAN, LOST])
def test_neither_a_metric_nor_a_parameter_alone_ends_it_but_a_parameter_is_warned_of(
    run: Run, harmless: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(f"{TRAIN}{harmless}\nmodel(torch.ones(1, 2)).sum().backward(); optimizer.step()").code == 0
    assert caplog.text.count("parameter weight [1, 2] holds nan") == (harmless == LOST)


def test_a_lack_of_shared_memory_is_told_with_its_size(run: Run) -> None:
    outcome = run("raise RuntimeError('unable to allocate shared memory(shm) for file')")
    assert outcome.code == 1
    assert "/dev/shm has" in outcome.error
    assert outcome.traceback.rstrip().endswith("shared memory(shm) for file")


def test_a_script_written_for_ddp_is_told_what_to_use(run: Run) -> None:
    outcome = run(
        "import os, torch.distributed as dist\nfor name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR'):\n"
        "    os.environ.pop(name, None)\ndist.init_process_group('gloo')"
    )
    assert outcome.code == 1
    assert "set MASTER_ADDR to the host of rank 0, MASTER_PORT to a free port there" in outcome.error
    assert "or use hubring.init() and hubring.DistributedOptimizer" in outcome.error


@pytest.mark.parametrize(
    ("given", "flags", "place"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, {}, "3 4 0 - - torch"),
        ({"LOCAL_WORLD_SIZE": "2"}, {"rank": 3, "world_size": 4, "local_rank": 1}, "3 4 1 2 1 torch"),
        ({"KERAS_BACKEND": "jax"}, {"rank": 3}, "- - - - - jax"),  # only the server knows the size
    ],
)
def test_a_script_finds_its_place_where_torchrun_would_put_it_and_keras_its_backend(
    run: Run, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], flags: dict[str, int], place: str
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **given})
    outcome = run(
        "import os\nnames = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK KERAS_BACKEND'.split()\n"
        "raise SystemExit(' '.join(os.environ.get(name, '-') for name in names))",
        server="127.0.0.1:1",
        **flags,
    )
    assert outcome.error == place


def test_init_accepts_the_place_that_the_flags_gave(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    script = "import os\nfrom hubring.workers.launchers.placement import detect\ndetect(os.environ, 1, 2, 1)"
    outcome = run(script, rank=1, world_size=2, local_rank=1, server="127.0.0.1:1")
    assert outcome.code == 0, outcome.error


@pytest.mark.parametrize(
    ("size", "kind", "met"),
    [("1", LIGHTNING, True), ("2", LIGHTNING, False), ("2", "MPIEnvironment", True)],
)
def test_lightning_is_told_at_once_that_its_processes_will_not_meet(
    run: Run, monkeypatch: pytest.MonkeyPatch, size: str, kind: str, met: bool
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "LOCAL_RANK": "0", "WORLD_SIZE": size})
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_: None)
    outcome = run(
        f"import torch.distributed\nclass {kind}: pass\n"
        "def start(cluster_environment):\n"  # as in lightning.fabric.utilities.distributed
        "    torch.distributed.init_process_group('gloo')\n"
        f"start({kind}())"
    )
    assert outcome.code == (0 if met else 2), outcome.error
    assert ("Lightning's ranks do not know where to meet" in outcome.error) != met


def test_a_script_written_for_horovod_is_told_how_it_runs(run: Run) -> None:
    outcome = run("import horovod.torch as hvd")
    assert outcome.code == 1
    hint = "to run the script unchanged, use ps-worker --as-horovod SCRIPT"
    assert outcome.error.endswith(f"No module named 'horovod': {hint}")
    assert outcome.text("ps-worker") == f"{outcome.traceback}ps-worker: {hint}\n"
    assert "--as-horovod" not in run("import nosuch").error
    submodule = "raise ModuleNotFoundError('there is no horovod.keras', name='horovod.keras')"
    assert "--as-horovod" not in run(submodule).error


def test_an_error_message_is_printed_once(run: Run) -> None:
    failed, refused = run("1 / 0"), run("import hubring\nhubring.rank()")
    assert (failed.text("ps-worker"), failed.traceback.count(failed.error)) == (failed.traceback, 1)
    assert refused.text("ps-worker") == f"ps-worker: {refused.error}\n"


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)", "hubring.shutdown()"])
def test_a_script_that_ends_well_tells_its_result_however_it_ends(run: Run, ending: str) -> None:
    outcome = run(TRAIN + ending)
    assert (outcome.code, outcome.error) == (0, "")
    assert outcome.result["steps"] == 1
    assert outcome.result["metrics"] == {"loss": 0.5}
    json.dumps(outcome.result)


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("sys.exit(3)", 3, "the script exited with 3"),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('seven')", 1, "ValueError: seven"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("hubring.report(loss=[1, 2])", 2, "report(loss=...) got a list"),
    ],
)
def test_a_script_that_fails_tells_why_and_how_far_it_came(
    run: Run, ending: str, code: int, error: str
) -> None:
    outcome = run(TRAIN + ending)
    assert outcome.code == code
    assert outcome.error.startswith(error)
    assert outcome.result["steps"] == 1
    assert context.started() is None


def test_a_script_sees_what_python_would_show_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("SEVEN = 7\n")
    outcome = run(
        "import sys, pickle, neighbour\n"
        "class Mine: pass\n"
        "assert sys.argv == ['script.py', '--lr', '3'], sys.argv\n"
        f"assert sys.path[0] == {str(tmp_path)!r}, sys.path\n"
        "assert isinstance(pickle.loads(pickle.dumps(Mine())), Mine)\n"
        "assert __name__ == '__main__'\n"
        f"assert __file__ == {str(tmp_path / 'script.py')!r}\n",
        "--lr",
        "3",
    )
    assert (outcome.code, outcome.traceback) == (0, "")


def test_a_release_of_torch_that_was_not_tested_is_named_once(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "9.0.1")
    with caplog.at_level("WARNING"):
        assert run(TRAIN).code == 0
    assert caplog.text.count("torch 9.0.1 is newer than torch") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize("safe", [False, True])
def test_a_script_that_we_start_finds_its_neighbours_unless_the_user_wants_none(
    tmp_path: Path, safe: bool
) -> None:
    script, neighbour = tmp_path / "script.py", tmp_path / "neighbour.py"
    neighbour.write_text("print('found')")
    script.write_text("import neighbour")
    command = module_command("hubring.workers.programs.ps_worker", str(script))
    ended = started(tmp_path, *command, **({"PYTHONSAFEPATH": "1"} if safe else {}))
    assert ended.stdout.startswith("found\n") != safe, ended.stderr
    assert ("No module named 'neighbour'" in ended.stderr) == safe


def test_a_file_without_a_folder_is_refused_before_training(run: Run, tmp_path: Path) -> None:
    for setting in ("record", "save_parameters"):
        outcome = run(TRAIN, **{setting: tmp_path / "none" / "file"})
        assert outcome.code == ConfigError.exit_code
        assert "does not exist" in outcome.error


def test_a_script_may_change_its_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = {"save_parameters": Path("saved"), "record": Path("steps")}
    assert run(f"import os\nos.chdir('other')\n{TRAIN}", **paths).code == 0
    assert {"saved", "steps"} < {path.name for path in tmp_path.iterdir()}


def test_parameters_that_cannot_be_saved_are_a_failure(run: Run, tmp_path: Path) -> None:
    outcome = run(TRAIN, save_parameters=tmp_path)  # a folder
    assert (outcome.code, outcome.result["steps"]) == (1, 1)
    assert context.started() is None


ONE_MORE = "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_the_first_signal_ends_training_after_its_step_and_the_second_at_once(
    run: Run, number: signal.Signals, code: int, times: int
) -> None:
    raises = f"import signal\nfor _ in range({times}): signal.raise_signal({int(number)})\n"
    outcome = run(f"{TRAIN}{raises}{ONE_MORE}raise AssertionError('went on')\n")
    assert (outcome.code, outcome.result["steps"]) == (code, 3 - times)


def test_a_scheduler_that_repeats_itself_asks_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers pass on what everybody got already."""
    twice = "import signal\nfor name in {}: signal.raise_signal(getattr(signal, name))\n"
    for asked in (["SIGUSR1"], ["SIGUSR1", "SIGUSR1", "SIGTERM"]):
        outcome = run(f"{TRAIN}{twice.format(asked)}{ONE_MORE}raise AssertionError('went on')\n")
        assert (outcome.code, outcome.result["steps"]) == (75, 2)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run(TRAIN + twice.format(("SIGTERM", "SIGTERM")) + ONE_MORE).result["steps"] == 2
    assert run(TRAIN + twice.format(("SIGTERM", "SIGINT")) + ONE_MORE).result["steps"] == 1


def test_a_lone_worker_that_was_stopped_goes_on_at_its_step(run: Run, tmp_path: Path) -> None:
    asked = "import signal\nsignal.raise_signal(signal.SIGTERM)\n"
    stopped = run(TRAIN + asked + ONE_MORE, checkpoint_dir=tmp_path)
    assert (stopped.code, stopped.result["steps"]) == (75, 2)
    again = run(TRAIN + "assert optimizer.completed_steps == 3\n", checkpoint_dir=tmp_path)
    assert (again.code, again.result["steps"]) == (0, 3)


def test_an_error_after_a_signal_counts_as_the_requested_stop(run: Run) -> None:
    asked = "sys.excepthook = lambda *_: sys.exit(9)\nimport signal\nsignal.raise_signal(signal.SIGTERM)\n"
    outcome = run(f"{TRAIN}{asked}raise RuntimeError('no data')")
    assert outcome.code == 75
    assert "RuntimeError: no data" in outcome.error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_at_its_end_is_not_asked_to_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    leave = context.shutdown

    def late(*reasons: Any) -> None:
        signal.raise_signal(number)
        leave(*reasons)
        signal.raise_signal(number)  # by now there is no context that could note it

    monkeypatch.setattr(context, "shutdown", late)
    outcome = run(TRAIN)
    assert (outcome.code, outcome.result["steps"]) == (0, 1)


def test_a_forked_child_heeds_signals_as_any_process_and_leaves_nothing(run: Run) -> None:
    outcome = run(
        TRAIN + "import os, signal, time\n"
        "ask_worker = signal.getsignal(signal.SIGTERM)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    hubring.shutdown()\n"
        "    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, 'too late before a wait for a lock'\n"
        "    ask_worker(signal.SIGTERM, None)  # as from a handler of the script\n"
        "    os._exit(0)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status\n"
        "assert hubring.rank() == 0\n"
    )
    assert outcome.traceback == ""
    assert outcome.code == 0


def test_a_script_that_never_asks_for_its_place_is_warned(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert run("pass", server="127.0.0.1:1").code == 0
    assert "did not call hubring.init()" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("", "FINISHED "),
        ("raise ValueError('seven')", "FAILED ValueError: seven"),
        ("hubring.shutdown()", "FINISHED "),
        ("import os\nif os.fork() == 0: raise SystemExit\nos.wait()", "FINISHED "),
    ],
)
def test_a_plain_script_leaves_the_job_once_and_tells_how_it_ended(
    tmp_path: Path, ending: str, told: str
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN + ending)
    ended = started(tmp_path, sys.executable, str(script))
    assert ended.stdout == f"{told}\n", ended.stderr
    assert ended.returncode == int(told.startswith("FAILED"))


STEP = "def late(): model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
START = "from threading import Thread\nThread(target=late).start()\n"
POOL = "from concurrent.futures import {0}\npool = {0}(1)\n"
STOP = "def late():\n    import os; os.kill(os.getpid(), 15)\n    while True: step()\n"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize(
    ("ending", "steps", "code"),
    [
        (STEP + START, 2, 0),
        (f"{STEP}{START}sys.exit(0)", 2, 0),
        (f"{STEP}{POOL.format('ThreadPoolExecutor')}pool.submit(late)", 2, 0),
        (f"{POOL.format('ProcessPoolExecutor')}pool.submit(abs, 1).result()", 1, 0),
        (f"{STEP.replace('late', 'step')}{STOP}{START}", None, 75),
    ],
    ids=["thread", "exit", "executor", "idle processes", "stopped in a thread"],
)
def test_a_script_ends_with_its_last_thread(
    tmp_path: Path, ending: str, steps: int | None, code: int
) -> None:
    (tmp_path / "script.py").write_text(TRAIN + ending)
    ended = started(tmp_path, *module_command("hubring.workers.programs.ps_worker", "script.py"))
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (ended.returncode, result["exit_code"]) == (code, code), ended.stderr
    assert result["steps"] == (steps or result["steps"])


@pytest.mark.parametrize(
    ("hook", "code", "shown", "traced"),
    [
        ("print(hubring.size(), kind.__name__)", 1, "1 ValueError\n", False),
        ("raise SystemExit(7)", 7, "", False),
        ("1 / 0", 1, "", True),
    ],
)
def test_the_error_hook_of_a_script_is_called_as_in_plain_python(
    run: Run, capsys: pytest.CaptureFixture[str], hook: str, code: int, shown: str, traced: bool
) -> None:
    sets = f"def hook(kind, *_): {hook}\nsys.excepthook = hook\n"
    outcome = run(f"{TRAIN}{sets}raise ValueError('the cause')")
    assert (outcome.code, outcome.result["steps"]) == (code, 1)
    assert ("ValueError: the cause" in outcome.traceback) == traced
    out, err = capsys.readouterr()
    assert (out, "ZeroDivisionError" in err) == (shown, traced)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_forked_child_reports_no_result(tmp_path: Path, ending: str, code: int) -> None:
    script, fork = tmp_path / "script.py", "import os\nif os.fork() == 0: " + ending
    script.write_text(f"{TRAIN}{fork}\nelse: print(os.waitstatus_to_exitcode(os.wait()[1]))")
    ended = started(tmp_path, *module_command("hubring.workers.programs.ps_worker", str(script)))
    status, result = ended.stdout.splitlines()
    assert (int(status), json.loads(result)["exit_code"]) == (code, 0), ended.stderr
