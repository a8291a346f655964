"""Bandwidths in the columns of nccl-tests, and prices, come from what was measured and from the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hubring.workers.compare.measure import price
from hubring.workers.compare.plan.experiment import FaultTable, PricesTable
from hubring.workers.compare.plan.row import EVERY
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.run.outcome import RunOutcome
from hubring.workers.compare.show.screen import notes
from tests.support.compare.replayed import Replayed, compared, findings

EXCHANGE = {"exposed_seconds": 0.5, "hidden_seconds": 0.3}
"""Of 100 steps, so 5 ms and 3 ms in each."""


def lines(folder: Path, trainer: Replayed | None = None, **changes: Any) -> dict[str, dict[str, Any]]:
    """By row; the model has three elements, and all but `local` tell what was hidden."""
    told = {row: {"exchange": EXCHANGE} for row in ("ring", "hub-bsp", "hub-asp")}
    trainer = trainer or Replayed()
    trainer.results = {**told, **trainer.results}
    return {each["row"]: each for each in compared(folder, trainer, **changes)["bandwidth"]}


def test_a_line_is_one_exchange_of_the_whole_model(tmp_path: Path) -> None:
    found = lines(tmp_path, workers=(4,))
    assert found["ring"] == {
        "setting": "n4 k1",
        "row": "ring",
        "size": 12,
        "count": 3,
        "type": "float",
        "redop": "avg",
        "time": pytest.approx(8000),
        "algbw": pytest.approx(1.5e-6),
        "busbw": pytest.approx(2.25e-6),
        "wrong": 0,
    }


def test_rows_without_an_average_or_a_check_are_marked(tmp_path: Path) -> None:
    found = lines(tmp_path)
    assert {row: (each["redop"], each["wrong"]) for row, each in found.items()} == {
        "ring": ("avg", 0),
        "hub-bsp": ("avg", 0),
        "hub-asp": ("none", None),
    }


def test_wrong_elements_are_counted_over_seeds_and_the_times_withheld(tmp_path: Path) -> None:
    parameters = {"n2 k1 ring seed0": 1.5, "n2 k1 ring seed1": 1.5}
    found = lines(tmp_path, Replayed(parameters=parameters))["ring"]
    assert found["wrong"] == 6
    assert (found["time"], found["algbw"], found["busbw"]) == (None, None, None)


def test_rows_without_times_or_bytes_have_no_line(tmp_path: Path) -> None:
    silent = {"ring": {"exchange": EXCHANGE | {"bytes_sent": 0}}, "hub-asp": {}}
    assert lines(tmp_path, Replayed(results=silent)).keys() == {"hub-bsp"}


def test_where_a_worker_was_lost_there_is_no_line(tmp_path: Path) -> None:
    assert lines(tmp_path, fault=FaultTable(rank=1, step=5, baseline=True)).keys() == {
        "ring",
        "hub-bsp",
        "hub-asp",
    }
    assert lines(tmp_path / "lost", fault=FaultTable(rank=1, step=5)) == {}


def test_types_are_called_as_nccl_tests_calls_them_and_several_are_mixed(tmp_path: Path) -> None:
    class Saved(Replayed):
        def run(self, run: PlannedRun, folder: Path, progress: Any) -> RunOutcome:
            left = Replayed.run(self, run, folder, progress)
            save_file({"w": torch.ones(3).half(), "b": torch.ones(2, dtype=dtype)}, left.parameters)
            return left

    told = {}
    for dtype in (torch.float16, torch.float64):
        ring = lines(tmp_path / str(dtype), Saved(), rows=("ring", "hub-bsp"))["ring"]
        told[ring["type"]] = (ring["size"], ring["count"])
    assert told == {"half": (10, 5), "mixed": (22, 5)}


PRICES = PricesTable(worker=4.0, server=0.5)


@pytest.mark.parametrize(
    ("row", "hourly"),
    [
        ("local", 4.0),
        ("ring", 16.0),
        ("ddp", 16.0),
        ("hub-bsp", 17.0),
        ("hub-standby", 18.0),
        ("hub-colocated", 16.0),
        ("rpc", 17.0),
    ],
)
def test_a_row_pays_for_the_hosts_that_it_needs(row: str, hourly: float) -> None:
    way = EVERY[row]
    run = PlannedRun(way.meets(Setting(workers=4, servers=2)), way, 0)
    found = price(run, {"seconds": 1800.0, "seconds_to_target": 900.0}, PRICES, 5)
    assert found == {"price_per_epoch": hourly / 2 / 5, "price_to_target": hourly / 4}


@pytest.mark.parametrize("epochs", [None, 5])
def test_a_price_that_is_missing_says_what_it_needs(tmp_path: Path, epochs: int | None) -> None:
    found = findings(tmp_path, prices=PRICES, epochs=epochs, seeds=(0,))
    assert any("set epochs in the file" in note for note in notes(found)) == (epochs is None)
