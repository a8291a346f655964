"""Ray places a hub and its workers."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ps.errors import UsageError
from tests.system.cluster import SMALL, Cluster
from workers import on_ray

DRIVER = str(Path(__file__).with_name("on_ray_driver.py"))
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="no ray here: pip install 'hubring[ray]'")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'hubring\[ray\]'"):
        on_ray.train([], workers=2)


@pytest.mark.slow
@with_ray
@pytest.mark.parametrize("topology", ["hub", "ring"])
def test_ray_starts_hub_and_workers(cluster: Cluster, topology: str) -> None:
    words = ["2", "--topology", topology, "--", SMALL, "10"]
    program = cluster.start("driver", [sys.executable, DRIVER, *words])
    results = program.done(timeout=240)
    told = [(one["rank"], one["size"], one["steps"], one["topology"], one["exit_code"]) for one in results]
    assert told == [(0, 2, 10, topology, 0), (1, 2, 10, topology, 0)]


@pytest.mark.slow
@with_ray
def test_a_worker_that_fails_comes_back_as_a_result(cluster: Cluster) -> None:
    program = cluster.start("driver", [sys.executable, DRIVER, "2", "--", "nowhere.py"])
    results = program.done(timeout=240)
    assert [one["exit_code"] for one in results] == [2, 2]
    assert "no script nowhere.py" in results[0]["error"]
