"""The campaign that kills members of a ring finds what each generation leaks."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.campaign.healing import run as healing
from tests.campaign.healing.run import FEWEST, MEMBERS, Run
from tests.campaign.resources import Held
from tests.support.processes.cluster import Cluster


class Play(Run):
    """A run without programs. Each member's process number is its own number."""

    def _member(self, address: str, rank: int | None) -> Any:
        self._started += 1
        process = SimpleNamespace(pid=self._started, send_signal=lambda _: None, wait=lambda: None)
        return SimpleNamespace(name=f"member{self._started}", process=process, until=lambda *_: None)


@pytest.mark.parametrize("per_kill", [0, 1])
def test_a_leak_in_each_generation_is_a_violation(
    per_kill: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SimpleNamespace(folder=tmp_path, server=lambda *_: (None, ""))
    run = Play(cast(Cluster, cluster), FEWEST, random.Random(1))
    measured: list[int] = []

    def held(pid: int) -> Held:
        measured.append(pid)
        return Held(20, 10 + per_kill * len(run.moments), 5, 2**28)

    monkeypatch.setattr(healing, "held", held)
    monkeypatch.setattr(healing, "time", SimpleNamespace(sleep=lambda _: None, time=lambda: 0.0))
    run.play()
    first, last = measured
    assert first == last > MEMBERS  # one member that lives through the second half
    assert run.leaks() == ([f"8 kills beside member{first}: threads grew from 22 to 30"] if per_kill else [])
