"""The jobs that ship learn, repeat themselves, and go on where an earlier run stopped."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import hubring
from hubring.workers import api
from hubring.workers.examples import char_lm, digits
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.processes.cluster import Cluster

EXAMPLES = Path(str(files("hubring.workers.examples")))
SCRIPTS = ["digits.py", "char_lm.py", "train.py"]


class Alone:
    """A worker whose reports are kept, and whose earlier run a test may pretend."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.models: list[torch.nn.Module] = []
        self.done = 0
        self.order: list[str] = []

    def optimizer(self, wrapped: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
        self.models.append(model)
        order = self.order

        class Noted(DistributedOptimizer):
            def refresh(self) -> None:
                order.append("refresh")
                super().refresh()

        made = Noted(wrapped, model)
        made._steps = self.done
        return made


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alone]:
    job = Alone()
    monkeypatch.setattr(hubring, "report", lambda **metrics: job.reports.append(metrics), raising=False)
    monkeypatch.setattr(hubring, "DistributedOptimizer", job.optimizer, raising=False)
    monkeypatch.setattr(hubring, "barrier", lambda name: job.order.append(name), raising=False)
    threads = torch.get_num_threads()
    yield job
    torch.set_num_threads(threads)
    hubring.shutdown()


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "script", [*SCRIPTS, "lm_ptb.py", "mnist.py", "ddp_amp.py", "mpi_patterns.py", "checkpoint.py"]
)
def test_a_job_uses_the_public_names_alone_and_none_of_a_topology(script: str) -> None:
    tree = ast.parse((EXAMPLES / script).read_text())
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in named if isinstance(node.value, ast.Name) and node.value.id == "hubring"}
    assert used
    assert used <= set(api.__all__) - {"topology"}
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert script not in SCRIPTS or not [name for name in imported if name.startswith("hubring.")]


def test_the_readmes_script_is_short_and_marks_its_five_lines() -> None:
    lines = (EXAMPLES / "train.py").read_text().splitlines()
    assert 25 <= len(lines) <= 35
    assert [line.partition("  # ")[2][0] for line in lines if "  # " in line] == list("12345")


@pytest.mark.parametrize(
    ("job", "words", "told"),
    [
        (digits, [], "--batch-size 64 is not divisible by 3 workers"),
        (char_lm, ["--batch-size", "2"], "--batch-size 2 is too small for 3 workers"),
    ],
)
def test_batches_that_cannot_be_shared_are_a_usage_error(
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: Any,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(hubring, "size", lambda: 3, raising=False)
    with pytest.raises(SystemExit) as ended:
        job.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_three_workers_lines_of_char_lm_are_together_those_of_one(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def first_gradient(rank: int, size: int) -> torch.Tensor:
        def stop(*_: object) -> None:
            raise Stop

        monkeypatch.setattr(hubring, "rank", lambda: rank, raising=False)
        monkeypatch.setattr(hubring, "size", lambda: size, raising=False)
        monkeypatch.setattr(DistributedOptimizer, "step", stop)
        monkeypatch.setattr(char_lm, "_report", lambda *_: None)
        with pytest.raises(Stop):
            char_lm.main(["--batch-size", "64", "--threads", "1"])
        gradients = [parameter.grad for parameter in alone.models[-1].parameters()]
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

    mean = sum(first_gradient(rank, 3) for rank in range(3)) / 3
    torch.testing.assert_close(mean, first_gradient(0, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.full
def test_digits_learns_to_95_percent(alone: Alone) -> None:
    digits.main(["--threads", "1"])
    measured = [report for report in alone.reports if "test_accuracy" in report]
    assert [report["epoch"] for report in measured] == list(range(21))
    assert measured[0]["test_accuracy"] < 0.3
    assert measured[-1]["test_accuracy"] >= 0.95
    assert len([report for report in alone.reports if "loss" in report]) == 20 * (1437 // 64)


@pytest.mark.slow
@pytest.mark.full
def test_char_lm_gets_below_what_letters_alone_would_tell(alone: Alone) -> None:
    char_lm.main(["--epochs", "1", "--threads", "1"])
    measured = [report["bits_per_char"] for report in alone.reports if "bits_per_char" in report]
    assert measured[0] > 6
    assert measured[-1] < 3.2


@pytest.mark.slow
def test_the_same_seed_gives_the_same_parameters_and_another_seed_others(alone: Alone) -> None:
    for seed in ("5", "5", "6"):
        digits.main(["--epochs", "1", "--seed", seed, "--threads", "1"])
    first, again, other = map(parameters, alone.models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_steps_of_an_earlier_run_are_skipped_not_repeated(alone: Alone) -> None:
    alone.done = 30
    digits.main(["--epochs", "2", "--threads", "1"])
    assert len([report for report in alone.reports if "loss" in report]) == 44 - 30
    assert [report["epoch"] for report in alone.reports if "epoch" in report] == [2]
    assert alone.order == ["end", "refresh"]


@pytest.mark.slow
@pytest.mark.parametrize("job", [digits.main, pytest.param(char_lm.main, marks=pytest.mark.full)])
def test_the_last_measurement_comes_after_everyones_last_gradient(
    alone: Alone, job: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubring, "report", lambda **metrics: alone.order.append(*sorted(metrics)[:1]))
    job(["--epochs", "1", "--batch-size", "1024", "--threads", "1"])
    assert alone.order[0] == "start"
    assert alone.order[-3:-1] == ["end", "refresh"]
    assert alone.order[-1] in ("epoch", "bits_per_char")


@pytest.mark.slow
def test_the_readmes_script_runs_by_itself_and_its_loss_falls(cluster: Cluster) -> None:
    script = cluster.run("script", "hubring.workers.examples.train")
    assert script.wait() == 0, script.said()
    losses = [float(line.split()[-1]) for line in script.out.read_text().splitlines() if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("module", ["digits", "char_lm"])
def test_threads_asked_for_are_the_threads_taken(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = torch.get_num_threads()
    monkeypatch.setattr(hubring, "init", lambda: torch.set_num_threads(1), raising=False)
    monkeypatch.setattr(hubring, "size", lambda: 1, raising=False)
    try:
        importlib.import_module(f"hubring.workers.examples.{module}")._start(["--threads", "2"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(taken)
