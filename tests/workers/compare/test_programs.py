"""What the programs of a row are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.workers.compare.experiment.experiment import LinkTable
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.experiment.row import select
from hubring.workers.compare.hardship.hosts import Hosts
from hubring.workers.compare.run.programs import Programs
from tests.support.compare.replayed import experiment


@pytest.mark.parametrize(
    ("word", "told"),
    [("--batch={batch}", "--batch=8"), ("${batch}", "${batch}"), ("{{batch}}", "{{batch}}"), ("{}", "{}")],
)
def test_a_name_in_single_braces_is_filled_in_and_no_other(tmp_path: Path, word: str, told: str) -> None:
    (tmp_path / "a.py").touch()
    script = {"job": None, "script": tmp_path / "a.py", "metric": "loss", "rows": ("local",), "seeds": (0,)}
    plan = experiment(**script, batch=8, arguments=("{batch}", word))
    (way,) = plan.ways
    programs = Programs(plan, Run(plan.settings[0], way, 0), tmp_path, Hosts())
    assert programs.worker(0, None)[-2:] == ["8", told]


@pytest.mark.parametrize("row", ["local", "ring", "hub-bsp", "hub-colocated"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_workers_of_all_rows_have_gpus_or_those_of_none(row: str, backend: str) -> None:
    plan = experiment(rows=(row,), backend=backend)
    programs = Programs(plan, Run(plan.settings[0], plan.ways[0], seed=0), Path("run"), Hosts())
    words = programs.worker(0, None if row == "local" else "hub:5555")
    assert ("--own-gpu" in words) == (backend == "nccl")


@pytest.mark.parametrize(
    ("row", "asked", "wire"),
    [
        ("hub-bsp", {}, "auto"),
        ("hub-bsp", {"transport": "grpc"}, "grpc"),
        ("hub-bsp", {"link": LinkTable(rate=(1e9,))}, "zmq"),
        ("hub-shm", {"transport": "grpc"}, "shm"),
        ("hub-zmq", {}, "zmq"),
        ("hub-grpc", {"link": LinkTable(rate=(1e9,))}, "grpc"),
    ],
)
def test_a_hub_row_goes_by_its_own_wire_or_by_the_experiments(
    row: str, asked: dict[str, object], wire: str
) -> None:
    plan = experiment(rows=(row,), **asked)
    programs = Programs(plan, Run(plan.settings[0], select([row])[0], seed=0), Path("run"), Hosts())
    words = programs.worker(0, "hub:5555")
    assert "--backend" not in words, "that is the ring's"
    assert [words[place + 1] for place, word in enumerate(words) if word == "--transport"] == [wire]
