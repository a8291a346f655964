"""A short campaign with fixed seeds."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes.cluster import Cluster

SEEDS = ("2", "3", "4", "6", "11", "12", "20", "27")


@pytest.mark.slow
@pytest.mark.full
def test_the_invariants_hold_in_a_short_campaign(cluster: Cluster) -> None:
    campaign = cluster.start("campaign", [sys.executable, "-u", "-m", "tests.campaign", "--seeds", *SEEDS])
    code = campaign.wait()
    assert code == 0, campaign.out.read_text()
