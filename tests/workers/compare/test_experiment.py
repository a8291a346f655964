"""Experiments are read from files and flags, and refused with a mend where they make no sense."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import json

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.plan.experiment import Experiment, FaultTable, StragglerTable
from hubring.workers.compare.plan.experiment_file import load_experiment, shipped
from hubring.workers.compare.plan.row import EVERY, ROWS
from hubring.workers.compare.plan.setting import Link
from hubring.workers.runtime.slowdown import Straggler
from tests.support.compare.replayed import experiment

HARD = """
job = "char-lm"
rows = ["ring", "hub-bsp"]
seeds = 7
workers = [2, 4]
servers = [1, 2]
timeout = "2min"
[link]
rate = ["1gbit", 2e8]
latency = "5ms"
[straggler]
kind = "pareto"
seconds = "20ms"
ranks = [1]
baseline = true
[compute]
step = "50ms"
"""


FILLED = "script = 'a.py'\nmetric = 'x'\nseeds = 0\narguments = ['{}']"


def file(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_takes_one_value_for_a_list_and_quantities_with_units(tmp_path: Path) -> None:
    found = load_experiment(file(tmp_path, HARD), {})
    assert (found.name, found.seeds, found.timeout) == ("mine", (7,), 120.0)
    assert found.link is not None
    assert (found.link.rate, found.link.latency) == ((1e9, 2e8), (0.005,))
    assert found.compute is not None
    assert found.compute.step == (0.05,)


def test_the_grid_holds_every_value_with_every_other(tmp_path: Path) -> None:
    settings = load_experiment(file(tmp_path, HARD), {}).settings
    assert len(set(settings)) == 2 * 2 * 2 * 2
    assert {setting.link for setting in settings} == {
        Link(rate=1e9, latency=0.005),
        Link(rate=2e8, latency=0.005),
    }
    assert {setting.straggler for setting in settings} == {
        None,
        Straggler(kind="pareto", seconds=0.02, ranks=(1,)),
    }


def test_flags_are_stronger_than_the_file(tmp_path: Path) -> None:
    flags = {"workers": "3", "rate": "10mbit", "seeds": "4,5", "job": "digits", "rows": None}
    found = load_experiment(file(tmp_path, HARD), flags)
    assert (found.workers, found.seeds, found.job) == ((3,), (4, 5), "digits")
    assert found.link is not None
    assert (found.link.rate, found.link.latency) == ((1e7,), (0.005,))
    assert found.rows == ("ring", "hub-bsp")


def test_stragglers_and_losses_come_by_flags_as_by_tables() -> None:
    flags = {"straggler_ranks": "1,2", "straggler": "pareto:20ms,50ms", "kill": "3@100", "workers": "4"}
    found = load_experiment(None, flags)
    assert found.straggler == StragglerTable(kind="pareto", seconds=(0.02, 0.05), ranks=(1, 2))
    assert found.fault == FaultTable(rank=3, step=100)
    assert load_experiment(None, {"straggler": "20ms"}).straggler == StragglerTable(seconds=(0.02,))


def test_flags_of_stragglers_and_losses_leave_alone_what_they_do_not_name(tmp_path: Path) -> None:
    text = (
        HARD.replace("ranks = [1]", "ranks = [1]\nshape = 3") + "[fault]\nrank = 0\nstep = 5\nbaseline = true"
    )
    found = load_experiment(
        file(tmp_path, text), {"straggler": "host:1ms", "straggler_ranks": "0", "kill": "1@7"}
    )
    assert found.straggler == StragglerTable(
        kind="host", seconds=(0.001,), ranks=(0,), shape=3, baseline=True
    )
    assert found.fault == FaultTable(rank=1, step=7, baseline=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"straggler": "slow:20ms"}, "--straggler slow:20ms: expected one of constant, pareto, host"),
        ({"straggler": "pareto:"}, "--straggler pareto:: '': expected a time, such as 5ms"),
        ({"straggler": "host:-1"}, "--straggler host:-1: '-1': expected a time"),
        ({"straggler_ranks": "1"}, "--straggler-ranks 1: .* add --straggler KIND:SECONDS"),
        ({"straggler": "20ms", "straggler_ranks": "{x}"}, "--straggler-ranks {x}: expected a whole number"),
        ({"straggler": "20ms", "straggler_ranks": "0,2"}, "rank 2 of 2 workers; expected a rank from 0 to 1"),
        ({"kill": "1"}, "--kill 1: expected RANK@STEP, both counted from 0, as in 1@100, which kills"),
        ({"kill": "2@5"}, "rank 2 of 2 workers; expected a rank from 0 to 1"),
        ({"kill": "0@5"}, "rank = 0, step = 5: expected a rank from 1 \\(rank 0 measures the model"),
        ({"kill": "1@1"}, "rank = 1, step = 1: .* a step from 2"),
        ({"metric": "test_loss"}, "metric = test_loss requires script; the metric .* is test accuracy"),
        ({"job": "digit"}, "no job .digit.; expected one of digits, char-lm"),
        ({"arguments": "--title 'two"}, "--arguments --title .two: No closing quotation"),
        ({"kill": "1@5", "rows": "ddp"}, r"row ddp does not survive a lost worker; remove the row .*--kill"),
        ({"rows": "ddp,ddp-hub"}, r"row ddp-hub trains scripts that make .* of their own; set script"),
        ({"script": "a.py", "seeds": "0", "metric_regex": "loss ,"}, r"loss , has no group; put the number"),
        ({"script": "a.py", "seeds": "0", "metric_regex": "loss ("}, r"loss \(: missing \)"),
        (
            {"script": "a.py", "seeds": "0", "metric_regex": "(x)", "rows": "ddp-hub", "rate": "1gbit"},
            "row ddp-hub needs one machine",
        ),
        (
            {"script": "a.py", "seeds": "0", "metric_regex": "(x)", "rows": "ddp,ring"},
            r"row ring needs a script with lines of Hubring, .* \(--rows ddp,ddp-hub\)",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused_with_their_mend(flags: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_experiment(None, flags)


@pytest.mark.parametrize(("metric", "rises"), [("test_loss", False), ("accuracy", True)])
def test_a_loss_is_better_if_it_is_lower(metric: str, rises: bool) -> None:
    asked = experiment(job=None, script=Path("a.py"), metric=metric, seeds=(0,))
    assert asked.yardstick.rising == rises


def test_words_in_quotes_are_one_argument() -> None:
    assert load_experiment(None, {"arguments": "--hidden 16 --title 'two words'"}).arguments == (
        "--hidden",
        "16",
        "--title",
        "two words",
    )


def test_without_a_file_digits_is_trained_in_every_way() -> None:
    found = load_experiment(None, {})
    assert (found.job, found.rows, found.seeds) == ("digits", tuple(ROWS), (0, 1, 2))


def test_a_script_is_found_beside_its_file_and_told_what_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    text = 'script = "train.py"\nmetric = "accuracy"\ntarget = 0.9\narguments = ["--seed", "{seed}"]'
    found = load_experiment(file(tmp_path, text), {})
    assert found.script == tmp_path / "train.py"
    assert (found.yardstick.title, found.yardstick.target) == ("accuracy", 0.9)


@pytest.mark.parametrize("name", shipped())
def test_experiments_that_ship_can_be_read_and_are_the_same_after_json(name: str) -> None:
    found = load_experiment(name, {})
    assert found.about
    assert json.decode(json.encode(found), type=Experiment) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sedes = [1]", r"sedes = \[1\] in .*mine.toml: no such setting; did you mean seeds"),
        ("[links]\nrate = 1", "did you mean link"),
        ("[link]\nraet = 1", r"raet = 1 in \[link\], .*did you mean rate"),
        ('workers = ["two"]', "expected a whole number, at least 1"),
        ('[link]\nrate = "1gb"', r"'1gb': expected a rate in bits per second, such as 200mbit"),
        ("link = 3", r"link = 3 in .*: expected a table \[link\]"),
        ("[straggler]\nranks = 1", r"\[straggler\] has no seconds; add it"),
        ('[straggler]\nkind = "slow"\nseconds = 1', "expected one of constant, pareto, host"),
        ("seeds = []", "seeds is empty"),
        ('rows = ["ring", "ring"]', "rows = ring, ring has a duplicate"),
        ("rows = []", "rows is empty"),
        ('job = "digits"\nscript = "a.py"', "either job, .* or script"),
        ('script = "a.py"', "needs metric"),
        ('script = "a.py"\nmetric = "x"\nseeds = 0', "no script .*a.py; relative paths start at"),
        ('script = "a.py"\nmetric = "x"', "does not receive its seed; add {seed} to arguments"),
        ('script = "a.py"\nmetric = "x"\nseeds = 0\nbatch = 8', "add {batch} to arguments"),
        (FILLED.format("--batch {batch}"), r"{batch} in arguments has no value; set batch \(--batch\)"),
        (FILLED.format('{"lr":{lr}}'), r"{lr} in .* set learning_rate \(--learning-rate\), or remove"),
        (
            FILLED.format("{workers}"),
            "unknown placeholder {workers} in arguments; expected one of {seed}, {batch}, {lr}",
        ),
        ('script = "a.py"\nmetric = "x"\nseeds = 0\nlr = "linear"', "set learning_rate"),
        ('transport = "shm"\n[link]\nrate = 1e9', "transport = shm with .*memory does not use the link"),
        ('rows = ["hub-shm"]\n[link]\nrate = 1e9', "row hub-shm with .*shared memory does not use the link"),
        ("[fault]\nrank = 2\nstep = 5", "expected a rank from 0 to 1"),
        ("seeds = [", "is not TOML"),
    ],
)
def test_an_invalid_experiment_is_refused_with_its_fix(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_experiment(file(tmp_path, text), {})


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("ring-int8", "its --compress needs Gloo"),
        *((name, "its library exchanges host memory") for name in ("mpi", "rpc", "ray")),
    ],
)
def test_rows_that_nccl_refuses_are_refused_before_the_first_run(row: str, why: str) -> None:
    asked: dict[str, Any] = {"job": "digits", "rows": ("ring", row)}
    assert Experiment(**asked).backend == "gloo"
    with pytest.raises(UsageError, match=f"row {row} does not run with backend = nccl: {why}; remove"):
        Experiment(**asked, backend="nccl")


def test_rows_on_gpus_and_of_hubs_run_beside_nccl() -> None:
    alone = ("local", "ring", "ring-heals", "ddp", "fsdp2", "zero1")
    rows = (*alone, "hub-bsp", "hub-int8", "hub-asp", "hub-colocated")
    assert Experiment(job="digits", rows=rows, backend="nccl").rows == rows
    assert "Gloo" not in EVERY["ring"].about, "it may be on NCCL"


def test_the_page_on_gpus_shows_an_experiment_and_gives_every_task_its_cores(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "deploy" / "GPU.md").read_text()
    (tmp_path / "train.py").touch()
    (table,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert load_experiment(file(tmp_path, table), {}).backend == "nccl"
    launches = [line for line in page.splitlines() if line.startswith("srun") and " ps-compare run" in line]
    assert len(launches) == 2
    assert all("--cpus-per-task=" in line for line in launches)
    assert "#SBATCH --cpus-per-task=" in page


@pytest.mark.parametrize(
    ("policy", "row", "rate"),
    [
        ({}, "hub-asp", None),
        ({"learning_rate": 0.2}, "hub-asp", 0.2),
        ({"lr": "linear"}, "local", 0.04),
        ({"lr": "per-worker"}, "hub-asp", 0.0025),
        ({"lr": "per-worker"}, "hub-bsp", None),
        ({"lr": "per-worker", "learning_rate": 0.2}, "hub-bsp", 0.2),
    ],
)
def test_the_learning_rate_follows_the_policy(policy: dict[str, Any], row: str, rate: float | None) -> None:
    assert experiment(**policy).rate_for(ROWS[row], 4) == rate
