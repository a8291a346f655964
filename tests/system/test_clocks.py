"""One experiment on two machines, each in a network namespace, whose clocks differ by seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.workers.compare.plan.setting import Link
from hubring.workers.compare.run.site import network, why_not
from tests.support.compare.anywhere import PATIENT, aligned, reported, write_experiment
from tests.support.processes.cluster import Cluster
from tests.support.processes.machines import NEED_MACHINES, machine

pytestmark = [pytest.mark.slow, *NEED_MACHINES]

AHEAD = 3


def test_machines_whose_clocks_differ_have_one_timeline(cluster: Cluster, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    out = tmp_path / "out"
    words = ["run", str(write_experiment(tmp_path)), "--out", str(out)]
    with network(2, Link(rate=1e9)) as hosts:
        tasks = [
            cluster.run(
                f"task {rank}",
                "hubring.workers.compare.cli",
                *words,
                within=[*host.command(), *machine(f"m{rank}", tmp_path, AHEAD * rank)],
                variables={"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address},
            )
            for rank, host in enumerate(hosts)
        ]
        for task in tasks:
            task.done(0, PATIENT)
    found = reported(out)
    assert [host["ranks"] for host in found["machine"]["hosts"].values()] == ["0", "1"]
    here, there = found["clocks"]
    assert here == {"name": "m0", "moved_us": 0, "error_us": 0, "drift_us": 0}
    assert there["name"] == "m1"
    assert abs(there["moved_us"] / 1e6 + AHEAD) <= (there["error_us"] + (there["drift_us"] or 0.0)) / 1e6
    assert f"m1 {there['moved_us'] / 1e6:+.6f}" in (out / "report.html").read_text()
    aligned(out, AHEAD, ["worker 0 on m0", "worker 1 on m1"])
