"""A script that changes all that it can ends the same on a hub, around a ring, and in torch alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes.cluster import Cluster
from tests.support.scripts import every_change

SCRIPT = str(Path(every_change.__file__))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["hub"],
        pytest.param(["hub", "--aggregate"], marks=pytest.mark.full),
        pytest.param(["ring"], marks=pytest.mark.full),
    ],
    ids=["hub", "aggregate", "ring"],
)
def test_every_change_has_its_effect(cluster: Cluster, tmp_path: Path, flags: list[str]) -> None:
    plain, ranks = tmp_path / "plain.pt", tmp_path / "ranks.pt"
    every_change.main("plain", str(plain))
    run = [sys.executable, "-m", "hubring.workers.programs.ps_run", "-np", "2", "--topology", *flags]
    program = cluster.start("ps-run", [*run, SCRIPT, "ranks", str(ranks)])
    assert program.wait() == 0, program.said()
    expected, found = torch.load(plain), torch.load(ranks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
