"""The gate lets rounding through, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from workers.compare.gate import TOLERANCE, Parameters, bits_difference, difference, judge


def parameters(factor: float = 1.0, name: str = "weight") -> dict[str, torch.Tensor]:
    return {name: torch.linspace(-2, 1, 30).reshape(5, 6) * factor, "bias": torch.ones(5)}


def test_the_difference_is_relative_to_the_largest_value_of_the_tensor() -> None:
    other = parameters()
    other["weight"][0, 3] += 0.5
    assert difference(parameters(), other) == (pytest.approx(0.25), "weight")


def test_the_worst_tensor_is_named_even_if_it_is_small() -> None:
    first = {"large": torch.full((4,), 1e6), "small": torch.full((4,), 1e-6)}
    second = {"large": torch.full((4,), 1e6 + 1), "small": torch.full((4,), 1.1e-6)}
    assert difference(first, second)[1] == "small"


def test_rounding_passes_and_one_percent_does_not() -> None:
    finals = {"local": parameters(), "ring": parameters(1 + 1e-6), "hub-bsp": parameters(1.01)}
    gate = judge(finals, {}, TOLERANCE)
    assert [pair.passed for pair in gate.pairs] == [True, False]
    assert not gate.passed
    assert gate.closed_to("ring") is None


def test_a_closed_gate_names_rows_tensor_difference_and_limit() -> None:
    reason = judge({"local": parameters(), "ring": parameters(1.5)}, {}, 1e-4).closed_to("ring")
    assert reason == "ring differs from local by 0.5 in weight; at most 0.0001 is allowed"


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"weight": torch.zeros(5, 6)}, "bias"),
        (parameters(name="kernel"), "kernel, weight"),
        ({"weight": torch.zeros(6, 5), "bias": torch.ones(5)}, "shape or dtype of weight"),
        ({"weight": torch.zeros(5, 6).double(), "bias": torch.ones(5)}, "shape or dtype of weight"),
    ],
)
def test_models_that_do_not_fit_fail(second: Parameters, what: str) -> None:
    apart, where = difference(parameters(), second)
    assert apart == math.inf
    assert what in where


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_passes(value: float) -> None:
    bad = parameters()
    bad["bias"][2] = value
    for finals in ({"a": parameters(), "b": bad}, {"a": bad, "b": parameters()}, {"a": bad, "b": bad}):
        assert not judge(finals, {}, math.inf if value != value else 1e9).passed


def test_zeros_agree_with_zeros_only() -> None:
    zeros, ones = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    assert difference(zeros, zeros)[0] == 0
    assert difference(zeros, ones)[0] == math.inf


def test_a_second_run_passes_only_if_every_bit_is_the_same() -> None:
    other = parameters()
    other["bias"][0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert judge({"hub-bsp": parameters()}, {"hub-bsp": parameters()}, TOLERANCE).passed
    gate = judge({"hub-bsp": parameters()}, {"hub-bsp": other}, TOLERANCE)
    assert "no difference at all is allowed" in (gate.closed_to("hub-bsp") or "")


def test_bits_tell_minus_zero_from_zero_and_take_scalars() -> None:
    assert bits_difference({"s": torch.tensor(0.0)}, {"s": torch.tensor(-0.0)})[0] > 0
    assert bits_difference({"s": torch.tensor(2.0)}, {"s": torch.tensor(2.0)})[0] == 0


def test_one_synchronous_row_has_nothing_to_be_held_against() -> None:
    gate = judge({"ring": parameters()}, {}, TOLERANCE)
    assert gate.passed
    assert gate.pairs == ()
