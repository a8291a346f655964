"""The gate lets rounding through, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hubring.workers.compare.gate.same_parameters import Parameters, difference
from hubring.workers.compare.plan.experiment import FaultTable
from hubring.workers.compare.run.outcome import EARLY
from hubring.workers.compare.statistics import SPEEDS
from tests.support.compare.replayed import Replayed, carried_out, compared, row


def parameters(factor: float = 1.0, name: str = "weight") -> dict[str, torch.Tensor]:
    return {name: torch.linspace(-2, 1, 30).reshape(5, 6) * factor, "bias": torch.ones(5)}


def judged(folder: Path, finals: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Results where runs end in other parameters than 1."""
    return compared(folder, Replayed(parameters=finals), **changes)


@pytest.mark.parametrize(("limit", "wrong"), [(0.0, 4), (1e-4, 3), (0.48, 2), (0.6, 1)])
def test_differences_are_relative_to_the_largest_value_of_a_tensor(limit: float, wrong: int) -> None:
    other = parameters()
    other["weight"][0, :3] += torch.tensor([0.9, 1e-6, math.nan])
    assert math.isnan(difference(parameters(), other, limit).apart)
    other["weight"][0, 2] = parameters()["weight"][0, 2]
    other["bias"][1] -= 0.5
    found = difference(parameters(), other, limit)
    assert found.apart == pytest.approx(0.5)
    assert found.tensor == "bias"
    other["weight"][0, 2] = math.nan
    assert difference(parameters(), other, limit).wrong == wrong


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"weight": torch.zeros(5, 6)}, "bias"),
        (parameters(name="kernel"), "kernel, weight"),
        ({"weight": torch.zeros(6, 5), "bias": torch.ones(5)}, "shape or dtype of weight"),
        ({"weight": torch.zeros(5, 6).double(), "bias": torch.ones(5)}, "shape or dtype of weight"),
    ],
)
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_models_that_do_not_fit_are_infinitely_apart(second: Parameters, what: str, limit: float) -> None:
    found = difference(parameters(), second, limit)
    assert (found.apart, found.wrong) == (math.inf, 35)
    assert what in found.tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_near_another(value: float) -> None:
    bad = parameters()
    bad["bias"][2] = value
    for first, second in ((parameters(), bad), (bad, parameters()), (bad, bad)):
        assert not difference(first, second, 1e9).apart <= 1e9
    assert difference(bad, bad, 0.0).apart == 0, "the bits are the same"


@pytest.mark.parametrize(
    ("first", "second", "limit", "apart", "wrong"),
    [
        ([0.0, 0.0], [0.0, 0.0], 1e-4, 0.0, 0),
        ([0.0, 0.0], [0.0, 1.0], 1e9, math.inf, 1),
        ([0.0, 1.0], [-0.0, 1.0], 1e-4, 0.0, 0),
        ([0.0, 1.0], [-0.0, 1.0], 0.0, 5e-324, 1),
        (0.0, -0.0, 0.0, 5e-324, 1),
        (2.0, 2.0, 0.0, 0.0, 0),
        ([], [], 0.0, 0.0, 0),
    ],
)
def test_zeros_agree_with_zeros_only_and_without_a_limit_bit_by_bit(
    first: Any, second: Any, limit: float, apart: float, wrong: int
) -> None:
    found = difference({"w": torch.tensor(first)}, {"w": torch.tensor(second)}, limit)
    assert found == (apart, "w" if apart else "any tensor", wrong)


def test_every_seed_and_setting_is_judged_against_the_first_synchronous_row(tmp_path: Path) -> None:
    pairs = judged(tmp_path, {}, servers=(1, 2))["gate"]["pairs"]
    told = [(pair["setting"], pair["seed"], pair["first"], pair["second"]) for pair in pairs]
    assert told == [
        *(("n2 k1", seed, "local", second) for seed in (0, 1) for second in ("ring", "hub-bsp")),
        ("n2 k2", 0, "local", "hub-bsp"),  # the ring meets no servers, and was judged
        ("n2 k2", 1, "local", "hub-bsp"),
        *(("n2 k1", seed, "hub-bsp", "hub-bsp again") for seed in (0, 1)),
    ]


def test_a_row_that_disagrees_with_one_seed_shows_no_speed_but_says_why(tmp_path: Path) -> None:
    results = judged(tmp_path, {"n2 k1 ring seed1": 1.5})
    ring = row(results, "ring")
    said = "ring differs from local by 0.5 in w (seed 1), 3 elements in all; at most 0.0001 is allowed"
    assert ring["withheld"] == said
    assert ring["numbers"]["samples_per_second"] is None
    assert ring["numbers"]["final_metric"] is not None
    assert results["verdict"][0] == f"No speed is shown for ring: {said}."
    assert not any("ring" in sentence for sentence in results["verdict"][1:])


def test_a_second_run_passes_only_if_every_bit_is_the_same(tmp_path: Path) -> None:
    results = judged(tmp_path, {"n2 k1 hub-bsp seed0 turn1": 1.0 + 2**-20})
    withheld = row(results, "hub-bsp")["withheld"]
    assert withheld is not None
    assert "no difference is allowed" in withheld


ON_GPUS: dict[str, dict[str, Any]] = {
    name: {"device": "cuda"} for name in ("local", "ring", "hub-bsp", "hub-asp")
}


@pytest.mark.parametrize(("again", "passed"), [(1.0 + 2**-20, True), (1.01, False)])
def test_a_second_run_on_a_gpu_may_round_as_another_row_may(
    tmp_path: Path, again: float, passed: bool
) -> None:
    """Kernels there add in another order in every run."""
    replayed = Replayed(parameters={"n2 k1 hub-bsp seed0 turn1": again}, results=ON_GPUS)
    results = compared(tmp_path, replayed)
    pairs = [pair for pair in results["gate"]["pairs"] if pair["second"] == "hub-bsp again"]
    assert [(pair["seed"], pair["limit"], pair["passed"]) for pair in pairs] == [
        (0, 1e-4, passed),
        (1, 1e-4, True),
    ]
    withheld = row(results, "hub-bsp")["withheld"]
    assert withheld is None if passed else "hub-bsp again differs from hub-bsp by 0.01" in withheld


def test_a_second_run_on_a_gpu_is_judged_after_its_first_steps(tmp_path: Path) -> None:
    trainer = Replayed(parameters={"n2 k1 hub-bsp seed0 turn1": 1.5}, results=ON_GPUS, early=1.0)
    gate = compared(tmp_path, trainer)["gate"]
    pair = next(pair for pair in gate["pairs"] if pair["second"] == "hub-bsp again")
    assert (pair["difference"], pair["steps"], pair["final"], pair["passed"]) == (0, EARLY, 0.5, True)


def test_rows_on_different_devices_show_no_speed(tmp_path: Path) -> None:
    on_gpus = {name: ON_GPUS[name] for name in ("ring", "hub-asp")}
    results = compared(tmp_path, Replayed(results=on_gpus))
    said = (
        "device (move the model and every batch to hubring.device()): cpu in local, and cuda in ring (seed 0)"
    )
    assert row(results, "local")["withheld"] == f"{said}; {said.replace('0)', '1)')}"
    assert all(each["numbers"]["samples_per_second"] is None for each in results["rows"])
    assert results["verdict"][0].startswith(f"No speed is shown for local: {said}")
    same = compared(tmp_path, Replayed(results=ON_GPUS))
    assert {each["withheld"] for each in same["rows"]} == {None}


def test_an_asynchronous_row_passes_no_gate_and_needs_none(tmp_path: Path) -> None:
    results = judged(tmp_path, {"n2 k1 hub-asp seed0": 7.0})
    assert results["gate"]["passed"]
    assert not any(each["withheld"] for each in results["rows"])


def test_a_parameter_that_is_not_a_number_is_still_valid_json(tmp_path: Path) -> None:
    results, _ = carried_out(tmp_path, Replayed(parameters={"n2 k1 ring seed0": math.nan}))
    assert results["gate"]["pairs"][0]["difference"] == "nan"
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_rounding_that_has_grown_by_the_end_is_told_and_not_held_against_a_row(tmp_path: Path) -> None:
    gate = compared(tmp_path, Replayed(parameters={"n2 k1 ring seed1": 1.01}, early=1.0))["gate"]
    told = [(pair["second"], pair["difference"], pair["steps"]) for pair in gate["pairs"]]
    assert told == [*(("ring", 0, EARLY), ("hub-bsp", 0, EARLY)) * 2, *(("hub-bsp again", 0, None),) * 2]
    assert gate["pairs"][2]["final"] == pytest.approx(0.01)
    assert gate["passed"]


def test_one_synchronous_row_has_nothing_to_be_held_against(tmp_path: Path) -> None:
    gate = judged(tmp_path, {}, rows=("ring", "hub-asp"))["gate"]
    assert gate["passed"]
    assert gate["pairs"] == []


def test_every_repeat_is_judged_against_the_reference_of_its_turn(tmp_path: Path) -> None:
    results = judged(tmp_path, {"n2 k1 ring seed1 turn2": 1.5}, repeats=3)
    turns = [(pair["seed"], pair["turn"]) for pair in results["gate"]["pairs"] if pair["second"] == "ring"]
    assert turns == [(seed, turn) for seed in (0, 1) for turn in range(3)]
    ring = row(results, "ring")
    assert ring["withheld"].startswith("ring differs from local by 0.5 in w (seed 1, turn 2)")
    assert {ring["numbers"][name] for name in SPEEDS} == {None}
    drawn = [each for each in results["curves"] if each["row"] == "ring"]  # of the seeds that agree
    assert [each["metric"] for each in drawn] == [[], []]
    assert {point["seconds"] for each in drawn for point in each["loss"]} == {0.0}


@pytest.mark.parametrize(
    ("rows", "withheld"),
    [
        (("ring", "hub-bsp"), {"ring", "hub-bsp"}),
        (("ring", "hub-bsp", "hub-asp"), {"ring", "hub-bsp"}),
        (("ring", "hub-bsp", "hub-aggregate"), {"hub-bsp"}),
        (("hub-bsp", "ring"), {"ring", "hub-bsp"}),  # that it agrees with itself upholds nothing
        (("local", "hub-bsp"), {"hub-bsp"}),
    ],
)
def test_of_two_that_differ_neither_is_shown_unless_another_agrees(
    tmp_path: Path, rows: tuple[str, ...], withheld: set[str]
) -> None:
    wrong = {f"n2 k1 hub-bsp seed0{turn}": 1.5 for turn in ("", " turn1")}
    results = judged(tmp_path, wrong, rows=rows, seeds=(0,))
    assert {each["row"] for each in results["rows"] if each["withheld"]} == withheld
    shown = {each["row"] for each in results["rows"] if each["numbers"]["step_ms"]}
    assert shown == set(rows) - withheld


def test_rows_that_lost_a_worker_are_not_held_against_each_other(tmp_path: Path) -> None:
    fault = FaultTable(rank=1, step=5)
    assert judged(tmp_path, {"n2 k1 kill1@5 hub-bsp seed0": 3.0}, fault=fault)["gate"]["pairs"] == []
