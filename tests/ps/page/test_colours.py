"""The page's colours can be told from its paper."""

from __future__ import annotations

import re

import pytest

from tests.support.pages.colours import TO_XYZ, linear, themed

WORDS = ("ink", "soft", "good", "held", "bad", "calm", "gone", "accent")


def colours(theme: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", themed("hubring.ps.page", theme)))


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("paper", ["paper", "raised"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_word_can_be_read_on_its_paper(theme: str, paper: str, name: str) -> None:
    found = {each: float((TO_XYZ @ linear(value))[1]) for each, value in colours(theme).items()}
    low, high = sorted((found[paper], found[name]))
    assert (high + 0.05) / (low + 0.05) >= 4.5
