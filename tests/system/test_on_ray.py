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
PATIENT = 300.0
"""Seconds: Ray's own processes take their time to start, on a busy machine a minute."""


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'hubring\[ray\]'"):
        on_ray.train([], workers=2)


@pytest.mark.slow
@pytest.mark.packages
@pytest.mark.skipif(find_spec("ray") is None, reason="no ray here: pip install 'hubring[ray]'")
def test_ray_starts_hub_and_workers_and_tells_how_they_ended(cluster: Cluster) -> None:
    program = cluster.start("driver", [sys.executable, DRIVER, SMALL, "10"])
    results = program.done(timeout=PATIENT)
    for topology in ("hub", "ring"):
        told = [(one["rank"], one["size"], one["steps"], one["topology"]) for one in results[topology]]
        assert told == [(0, 2, 10, topology), (1, 2, 10, topology)]
        assert [one["exit_code"] for one in results[topology]] == [0, 0]
    assert [one["exit_code"] for one in results["nowhere"]] == [2, 2]
    assert "no script nowhere.py" in results["nowhere"][0]["error"]
