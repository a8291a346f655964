"""A short campaign with fixed seeds."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes.cluster import Cluster

SEEDS = ("6", "46", "117", "151", "228", "544", "1118", "1416", "1295", "1555", "2726")
"""Hub and ring, each mode and wire, and a fault at each place whose outcome does not depend on a race.

The last three kill a shard, a coordinator and a standby in jobs with standbys.
"""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_invariants_hold_in_a_short_campaign(cluster: Cluster) -> None:
    campaign = cluster.start("campaign", [sys.executable, "-u", "-m", "tests.campaign", "--seeds", *SEEDS])
    code = campaign.wait(timeout=300)
    assert code == 0, campaign.out.read_text()
