"""The page's colours can be told from the paper and from each other, whatever kind of eye looks at them."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from tests.support.pages.colours import TO_XYZ, Vector, linear, themed

EYES = {
    "all cones": np.eye(3),
    "no red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""From linear RGB to what such an eye sees of it: Machado, Oliveira and Fernandes 2009, severity 1."""
WHITE = np.array([0.9505, 1.0, 1.089])
APART = 20.0
"""In CIELAB; 2.3 is what can just be noticed side by side, and lines are thin."""


def lab(light: Vector) -> Vector:
    ratio = TO_XYZ @ np.clip(light, 0, 1) / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def colours(theme: str) -> dict[str, str]:
    names = r"(--paper|--soft|--ink|--good|--bad|\.accent-\d)(?:: | \{ --accent: )(#[0-9a-f]{6})"
    return dict(re.findall(names, themed("hubring.workers.compare.show", theme)))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_colour_can_be_told_from_its_paper(theme: str) -> None:
    found = colours(theme)
    paper = float((TO_XYZ @ linear(found.pop("--paper")))[1])
    assert len(found) == 14
    for name, value in found.items():
        low, high = sorted((paper, float((TO_XYZ @ linear(value))[1])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_rows_that_ship_can_be_told_from_each_other(theme: str, eye: str) -> None:
    found = colours(theme)
    seen = {
        f"accent {slot}": lab(np.array(EYES[eye]) @ linear(found[f".accent-{slot}"])) for slot in range(6)
    }
    for (one, first), (other, second) in combinations(seen.items(), 2):
        assert np.linalg.norm(first - second) >= APART, f"{one} and {other}"
