"""Without the optional packages every program works, or exits with one line that names the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hubring.ps.core.packages import EXTRAS
from tests.support.processes.cluster import SMALL, TRAIN, Cluster, Program, measured

WORKER = "hubring.workers.programs.ps_worker"
COMPARE = "hubring.workers.compare.cli"
LACK = (
    "scikit-learn is not installed; install it with: pip install scikit-learn,"
    " or in a clone of Hubring: pip install '.[demo]'"
)
JOB_LACK = f"job digits: {LACK}; or use --job char-lm, which needs no extra package"

HIDING = f"""
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {list(EXTRAS)} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Hides the optional packages from a program and from all that it starts."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDING)
    here = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}:{here}"}


def one_line(program: Program, name: str, text: str) -> None:
    """The program exits with 78, and its standard error is this line alone."""
    assert program.done(78) == {"error": text, "exit_code": 78}
    assert program.said() == f"{name}: {text}\n"


@pytest.mark.slow
def test_the_job_that_needs_an_extra_is_refused(cluster: Cluster, bare: dict[str, str]) -> None:
    """It is the job without `--job`."""
    one_line(cluster.run("worker", WORKER, variables=bare), "ps-worker", JOB_LACK)


@pytest.mark.slow
@pytest.mark.full
def test_the_job_that_needs_no_extra_trains(cluster: Cluster, bare: dict[str, str]) -> None:
    flags = ["--job", "char-lm", "--", "--epochs", "1", "--batch-size", "512"]
    result = cluster.run("worker", WORKER, *flags, variables=bare).done()
    assert result["metrics"]["bits_per_char"] < 5


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_comparison_of_that_job_is_refused_before_it_measures(
    cluster: Cluster, bare: dict[str, str], command: str
) -> None:
    flags = {"run": [], "calibrate": ["--job", "digits"]}[command]
    name = {"run": "ps-compare", "calibrate": "ps-compare calibrate"}[command]
    one_line(cluster.run("compare", COMPARE, command, *flags, variables=bare), name, JOB_LACK)


@pytest.mark.slow
@pytest.mark.full
def test_a_comparison_of_a_script_needs_no_extra(
    cluster: Cluster, bare: dict[str, str], tmp_path: Path
) -> None:
    flags = measured(20, "--rows", "local", "--seeds", "0", "--out", str(tmp_path / "out"))
    program = cluster.run("compare", COMPARE, *flags, variables=bare)
    assert Path(program.done()["report"]).is_file()
    assert program.said().count("no TensorBoard scalars: tensorboard is not installed; install it with:") == 1
    assert not (tmp_path / "out" / "tensorboard").exists()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_writer_that_is_not_installed_is_refused_before_anything_starts(
    cluster: Cluster, bare: dict[str, str], package: str
) -> None:
    flags = ["--report-to", f"{package}:runs", SMALL, "5"]
    text = (
        f"--report-to {package}:runs: {package} is not installed; install it with: pip install {package},"
        f" or in a clone of Hubring: pip install '.[{package}]'"
    )
    program = cluster.run("run", "hubring.workers.programs.ps_run", "-np", "2", *flags, variables=bare)
    assert program.wait() == 78
    assert program.said() == f"ps-run: {text}\n"
    worker = cluster.run("worker", WORKER, *flags, variables=bare)
    assert text.partition(":runs")[2] in worker.done(78)["error"]  # there the folder is absolute


@pytest.mark.slow
@pytest.mark.full
def test_the_error_of_a_script_that_imports_an_extra_has_the_command(
    cluster: Cluster, bare: dict[str, str]
) -> None:
    result = cluster.run("worker", WORKER, TRAIN, variables=bare).done(1)
    assert result["error"] == f"ModuleNotFoundError: No module named 'sklearn': {LACK}"


@pytest.mark.slow
@pytest.mark.full
def test_the_bench_runs_the_cases_that_it_can(cluster: Cluster, bare: dict[str, str]) -> None:
    bench = cluster.run("bench", WORKER, "bench", "--cases", "2:digits:sgd", variables=bare)
    assert bench.done(78)["error"] == f"--cases 2:digits:sgd: {LACK}"
    assert json.loads(bench.out.read_text())["exit_code"] == 78
