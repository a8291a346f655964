"""A job of 64 simulated workers is watched; what that costs is printed, and measured longer by hand."""

from __future__ import annotations

import sys

import pytest

from hubring.ps.page.renderer import TICK_SECONDS
from tests.support.processes.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_sixty_four_workers_train_on_while_somebody_watches(cluster: Cluster) -> None:
    measured = cluster.run("cost", "tests.support.pages.cost", "64", "2", "1", "3", "0.1").done(0)
    plain, watched, scraped = measured["turns"]
    assert min(turn["steps"] for turn in measured["turns"]) > 0
    assert (plain["frames"], plain["scrapes"], watched["scrapes"]) == (0, 0, 0)
    # The first frame is the whole page; then comes one a rendering, or nothing.
    assert 2 <= watched["frames"] <= 2 + 3 / TICK_SECONDS
    assert scraped["scrapes"] >= 1
    print({name: value for name, value in measured.items() if name != "turns"}, file=sys.stderr)
