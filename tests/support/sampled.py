"""Which of many cases `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def sampled(names: Iterable[str], every: int = 8) -> list[object]:
    """Returns parameters of which one in `every` runs in `make test`, and the others in `make test-full`."""
    return [
        pytest.param(name, marks=() if place % every == 0 else pytest.mark.full)
        for place, name in enumerate(names)
    ]
