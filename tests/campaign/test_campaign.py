"""A short campaign with fixed seeds, and single runs with each kind of job."""

from __future__ import annotations

import sys

import pytest
from msgspec.structs import replace

from tests.campaign.runs import Runs
from tests.campaign.scenario import example
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

SEEDS = ("6", "46", "117", "151", "228", "544", "1118", "1416", "1295", "1555", "2726")
"""Hub and ring, each mode and wire, and a fault at each place whose outcome does not depend on a race.

The last three kill a shard, a coordinator and a standby in jobs with standbys.
"""


def test_the_invariants_hold_in_a_short_campaign(cluster: Cluster) -> None:
    campaign = cluster.start("campaign", [sys.executable, "-u", "-m", "tests.campaign", "--seeds", *SEEDS])
    code = campaign.wait(timeout=300)
    assert code == 0, campaign.out.read_text()


@pytest.fixture(scope="module")
def runs(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Plays each undisturbed job once."""
    return Runs(fork_server, tmp_path_factory.mktemp("campaign"))


JOBS = [
    ("bsp", "shm", "kill", "guarded shard"),
    ("bsp", "grpc", "kill", "guarded coordinator"),
    ("aggregate", "zmq", "kill", "guarded shard"),
    ("asp", "shm", "kill", "standby"),
    ("ssp", "grpc", "kill", "guarded shard"),
    ("backup", "zmq", "kill", "guarded coordinator"),
    ("ring", "gloo", "kill", "guarded coordinator"),
    ("bsp", "shm", "garbage", "ports"),
    ("bsp", "zmq", "garbage", "ports"),
    ("bsp", "grpc", "garbage", "ports"),
    ("ring", "gloo", "garbage", "ports"),
]


@pytest.mark.parametrize(("mode", "wire", "fault", "place"), JOBS)
def test_a_job_of_each_kind_trains_on(runs: Runs, mode: str, wire: str, fault: str, place: str) -> None:
    job = replace(example(mode, fault, place), wire=wire, shards=int(mode != "ring"), victim=0)
    (result,) = runs.play([replace(job, moment="within", workers=2 + (mode == "backup"))], print)
    if fault == "garbage":
        result.violations.pop("I5", None)  # gRPC logs a traceback for each request that it cannot read
    assert result.violations == {}
