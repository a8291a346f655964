"""The schedule gives up what can not be saved any more, whoever asked for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest

from hubring.ps.coordinator import checkpoints
from hubring.ps.coordinator.checkpoints import CheckpointSchedule
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import ConfigError
from tests.support.fakes.clock import FakeTime
from tests.support.fakes.coordinator import in_training


async def never(*_: object) -> tuple[Path, int]:
    """A save whose step does not come."""
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("in_passing", [False, True])
async def test_a_checkpoint_that_somebody_asked_for_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_passing: bool
) -> None:
    monkeypatch.setattr(checkpoints, "write_checkpoint", never)

    schedule = CheckpointSchedule(Fleet(5.0), tmp_path, 60.0, FakeTime(), Mock(), None)
    asked = None
    if in_passing:
        schedule.save_in_passing()
    else:
        asked = asyncio.create_task(schedule.save())
    while not schedule._saving.locked():
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    await schedule.give_up()
    if asked is not None:
        with pytest.raises(ConfigError, match="the job stopped before all shards"):
            await asked
    assert not schedule._saving.locked()
    assert schedule.written == 0


async def broken(*_: object) -> tuple[Path, int]:
    raise ValueError("a bug")


async def test_a_bug_in_a_background_checkpoint_is_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoints, "write_checkpoint", broken)

    schedule = CheckpointSchedule(Fleet(5.0), tmp_path, 60.0, FakeTime(), Mock(), None)
    schedule.save_in_passing()
    assert schedule._passing is not None
    await asyncio.wait([schedule._passing])
    with pytest.raises(ValueError, match="a bug"):
        await schedule.give_up()


async def test_a_save_that_a_takeover_interrupted_is_made_again(tmp_path: Path) -> None:
    hub, first, second = await in_training(checkpoint_dir=tmp_path)
    for place in (first, second):
        await hub.plan(place)
        await hub.beat(place, step=1)
    await hub.coordinator.tick()
    assert hub.fleet.saves.empty()
    hub.coordinator.take_over(saving=True)
    hub.fleet.may_save.set()
    await hub.coordinator.tick()
    assert await hub.fleet.saves.get() == 1
    await hub.coordinator.checkpoints.give_up()
