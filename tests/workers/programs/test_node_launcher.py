from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hubring.ps.config.sources import load_worker
from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers.placement import Placement, detect
from hubring.workers.programs.node_launcher import _again, places


def placements(outer: Placement, **flags: Any) -> list[Placement]:
    config = load_worker({"server": "hub:1", **flags}, environment={})
    return [detect(place) for place in places(config, outer)]


def test_ranks_are_those_of_pytorchs_tutorials() -> None:
    found = placements(Placement(), nodes=2, gpus=4, nr=1)
    assert [(one.rank, one.size, one.local_rank, one.local_size) for one in found] == [
        (4 + local, 8, local, 4) for local in range(4)
    ]
    assert {(one.node_rank, one.launcher) for one in found} == {(1, "ps-worker")}


OUTER = Placement(rank=1, size=2, launcher="slurm")


@pytest.mark.parametrize(("outer", "first", "size"), [(Placement(), 0, 2), (OUTER, 2, 4)])
def test_a_launcher_that_starts_one_a_host_says_which_and_else_there_is_one(
    outer: Placement, first: int, size: int
) -> None:
    assert [(one.rank, one.size) for one in placements(outer, gpus=2)] == [(first, size), (first + 1, size)]


@pytest.mark.parametrize(
    ("outer", "flags", "words"),
    [
        (Placement(local_size=4, launcher="slurm"), {}, "slurm started 4 commands on this host"),
        (OUTER, {"nr": 0}, "--nr is 0, but slurm reports 1; remove --nr"),
        (OUTER, {"nodes": 3}, "--nodes is 3, but slurm reports 2"),
        (Placement(), {"nr": 1}, "--nr 1 of 1 node"),
    ],
)
def test_flags_against_the_launcher_are_refused(outer: Placement, flags: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placements(outer, gpus=2, **flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"nodes": 2}, "--nodes 2 needs --gpus"),
        ({"gpus": 2, "rank": 1}, "--rank 1 applies to one worker"),
        ({"gpus": 2, "nodes": 2, "nr": 2}, "nodes go from 0 to 1"),
        ({"gpus": 2, "server": None}, "--gpus 2 needs --server"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placements(Placement(), **flags)


def test_workers_get_the_command_line_less_what_is_the_launchers() -> None:
    own: dict[str, Any] = {"nodes": 2, "gpus": 4, "nr": 0, "restarts": 3, "compress": None}
    flags = {"server": "hub:1", "aggregate": True, **own}
    assert _again(flags, Path("a.toml")) == ["--config", "a.toml", "--server", "hub:1", "--aggregate"]
    assert _again(own, None) == []
