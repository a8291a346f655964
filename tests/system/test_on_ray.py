"""Ray places a hub and its workers."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from hubring.ps.core import packages
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.workers.programs import on_ray
from tests.support.needs import needs
from tests.support.processes.cluster import SCRIPTS, SMALL, Cluster

DRIVER = str(SCRIPTS / "on_ray_driver.py")
PACKAGES, RAY = needs(find_spec("ray"), "ray", "pip install ray")
PATIENT = 300.0
"""Seconds: Ray's own processes take their time to start, on a busy machine a minute."""


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"on_ray\.train: ray is not installed; .* pip install '\.\[ray\]'"):
        on_ray.train([], workers=2)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"workers": 5}, r"5 worker\(s\) with 1 CPU each need 5, but the Ray cluster has 4; reduce workers="),
        ({"workers": 2, "cpus": 2.5}, r"2 worker\(s\) with 2.5 CPU each need 5, .* or cpus="),
        (
            {"workers": 2, "gpus": 1},
            r"2 worker\(s\) with 1 GPU each need 2, but the Ray cluster has 0; .* gpus=",
        ),
    ],
)
def test_a_cluster_that_has_no_room_for_all_workers_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    ray = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 4.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(UsageError, match=sentence):
        on_ray.train([], **asked)


@pytest.mark.slow
@PACKAGES
@RAY
def test_ray_starts_hub_and_workers_and_tells_how_they_ended(cluster: Cluster) -> None:
    program = cluster.start("driver", [sys.executable, DRIVER, SMALL, "10"])
    results = program.done(timeout=PATIENT)
    for topology in ("hub", "ring"):
        told = [(one["rank"], one["size"], one["steps"], one["topology"]) for one in results[topology]]
        assert told == [(0, 2, 10, topology), (1, 2, 10, topology)]
        assert [one["exit_code"] for one in results[topology]] == [0, 0]
    assert [one["exit_code"] for one in results["nowhere"]] == [2, 2]
    assert "script nowhere.py not found" in results["nowhere"][0]["error"]
