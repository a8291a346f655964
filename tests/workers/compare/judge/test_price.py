"""What training costs: hosts x hours x prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.workers.compare.experiment.experiment import Experiment, PricesTable
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.experiment.row import select
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.judge.price import price
from hubring.workers.compare.output.table import notes
from tests.support.compare.replayed import findings

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
    [way] = select([row])
    run = Run(way.meets(Setting(workers=4, servers=2)), way, 0)
    found = price(run, {"seconds": 1800.0, "seconds_to_target": 900.0}, PRICES, 5)
    assert found == {"price_per_epoch": hourly / 2 / 5, "price_to_target": hourly / 4}


def test_what_is_not_known_has_no_price() -> None:
    [way] = select(["ring"])
    run = Run(Setting(workers=2), way, 0)
    found = price(run, {"seconds": 1800.0, "seconds_to_target": None}, PRICES, None)
    assert found == {"price_per_epoch": None, "price_to_target": None}
    assert Experiment(job="digits").prices is None


@pytest.mark.parametrize("epochs", [None, 5])
def test_a_price_that_is_missing_says_what_it_needs(tmp_path: Path, epochs: int | None) -> None:
    found = findings(tmp_path, prices=PRICES, epochs=epochs, seeds=(0,))
    assert any("set epochs in the file" in note for note in notes(found)) == (epochs is None)
