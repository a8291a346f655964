"""From how many servers on the hub wins, and how speed goes with workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hubring.workers.compare.plan.experiment import LinkTable
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import Line
from hubring.workers.compare.show.page import page
from tests.support.compare.replayed import Replayed, compared, record
from tests.support.compare.results import read
from tests.support.pages.html_tree import html_tree

NOISY = {0: 0.5, 1: 1.5, 2: 1.0}
"""Factors of a step by seed, so that nothing is decided."""


def by_servers(
    folder: Path, steps: dict[int, float], noisy: Sequence[int] = (), **changes: Any
) -> dict[str, Any]:
    """Four workers behind slow links; a step of the ring takes 30 ms, the hub's may be noisy."""

    def records(run: PlannedRun) -> list[Line]:
        factor = NOISY[run.seed] if run.setting.servers in noisy else 1.0
        return record(0.03 if run.row.name == "ring" else factor * steps[run.setting.servers], pause=0.0)

    asked = {"rows": ("ring", "hub-bsp"), "seeds": (0, 1, 2), "link": LinkTable(rate=(2e8,))} | changes
    return compared(folder, Replayed(records=records), workers=(4,), servers=tuple(steps), **asked)


def test_the_verdict_says_from_how_many_servers_on_the_hub_wins(tmp_path: Path) -> None:
    results = by_servers(tmp_path, {1: 0.08, 2: 0.04, 4: 0.02})
    (found,) = results["crossover"]
    measured = {"setting": "n4 200mbit", "tried": [1, 2, 4], "measured": 4, "undecided": []}
    predicted = {"predicted": None, "calibrated": False, "by_bytes": 3, "formula": "k > n^2/(2(n-1))"}
    assert found == measured | predicted
    assert (
        "n4 200mbit, 1, 2, 4 servers tried: the hub is faster than the ring with 4 or more"
        " servers; no prediction; by bytes alone (k > n^2/(2(n-1))): with 3 or more servers."
    ) in results["verdict"]


@pytest.mark.parametrize(
    ("steps", "measured"),
    [
        ({1: 0.02, 2: 0.04, 4: 0.02}, 4),  # one that won by chance is not where it begins
        ({1: 0.08, 2: 0.0299, 4: 0.0295}, None),  # even
        ({1: 0.02, 2: 0.01}, 1),
    ],
)
def test_a_crossover_is_where_all_that_follow_win(
    tmp_path: Path, steps: dict[int, float], measured: int | None
) -> None:
    (crossover,) = by_servers(tmp_path, steps)["crossover"]
    assert crossover["measured"] == measured


FASTER = "faster than the ring"


@pytest.mark.parametrize(
    ("four", "noisy", "measured", "undecided", "said"),
    [
        (0.01, [2], 4, [2], f"{FASTER} with 4 or more servers, and it is not decided with 2 servers;"),
        (0.02, [2, 4], None, [2, 4], f"whether the hub is {FASTER} is not decided with 2 and 4 servers;"),
        (0.08, [2], None, [], f"the hub is {FASTER} with no number of servers;"),
    ],
)
def test_an_undecided_measurement_is_no_loss(
    tmp_path: Path, four: float, noisy: list[int], measured: int | None, undecided: list[int], said: str
) -> None:
    results = by_servers(tmp_path, {1: 0.08, 2: 0.02, 4: four}, noisy, seeds=(0, 1, 2))
    (crossover,) = results["crossover"]
    assert (crossover["measured"], crossover["undecided"]) == (measured, undecided)
    (sentence,) = [each for each in results["verdict"] if "servers tried" in each]
    assert said in sentence
    shown = html_tree(page(read(results))).section("scaling").text
    assert said in shown.replace("The hub", "the hub").replace("Whether", "whether")


def test_a_crossover_does_not_contradict_the_verdict_where_few_steps_are_slow(tmp_path: Path) -> None:
    def records(run: PlannedRun) -> list[Line]:
        if run.row.name == "ring":
            return record(0.03, pause=0.0)
        lines = record(0.02, pause=0.0)
        return [{**line, "seconds": line["seconds"] + 0.06 * (line["step"] // 4)} for line in lines]

    asked: dict[str, Any] = {"rows": ("ring", "hub-bsp"), "link": LinkTable(rate=(2e8,))}
    asked |= {"seeds": (0, 1, 2), "workers": (4,), "servers": (1, 2)}
    results = compared(tmp_path, Replayed(records=records), **asked)
    assert "With 2 servers: the hub (hub-bsp) loses to the ring" in "\n".join(results["verdict"])
    (crossover,) = results["crossover"]
    assert (crossover["measured"], crossover["undecided"]) == (None, [])


def test_one_seed_decides_no_crossover(tmp_path: Path) -> None:
    results = by_servers(tmp_path, {1: 0.08, 4: 0.015}, seeds=(0,))
    (crossover,) = results["crossover"]
    assert (crossover["measured"], crossover["undecided"]) == (None, [1, 4])
    assert not any("with no number of servers; no prediction" in each for each in results["verdict"])


def test_where_the_ring_did_not_run_nothing_is_said_of_a_crossover(tmp_path: Path) -> None:
    results = by_servers(tmp_path, {1: 0.08, 2: 0.04}, rows=("hub-bsp",))
    assert results["crossover"] == []


def test_speed_by_workers_is_listed(tmp_path: Path) -> None:
    results = compared(tmp_path, rows=("ring", "local"), workers=(2, 4))
    measured = [pytest.approx(6400), pytest.approx(12800)]
    expected = {"row": "ring", "workers": [2, 4], "measured": measured, "predicted": [None, None]}
    assert results["scaling"] == [expected]
