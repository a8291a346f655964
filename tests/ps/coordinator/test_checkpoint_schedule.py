"""The schedule gives up what can not be saved any more, whoever asked for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hubring.ps.coordinator import checkpoint_schedule
from hubring.ps.coordinator.checkpoint_publisher import Held
from hubring.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import ConfigError
from tests.support.fakes.clock import FakeTime


class NeverReached:
    """A writer whose step does not come."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        pass

    async def save(self, held: Held) -> tuple[Path, int]:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("in_passing", [False, True])
def test_a_checkpoint_that_somebody_asked_for_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_passing: bool
) -> None:
    monkeypatch.setattr(checkpoint_schedule, "CheckpointWriter", NeverReached)

    async def story() -> None:
        schedule = CheckpointSchedule(Fleet(5.0), tmp_path, 60.0, FakeTime(), lambda: None, None)  # type: ignore[arg-type, return-value]
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

    asyncio.run(asyncio.wait_for(story(), 20.0))


class Broken(NeverReached):
    """A writer with a bug."""

    async def save(self, held: Held) -> tuple[Path, int]:
        raise ValueError("a bug")


def test_what_nobody_expected_of_a_checkpoint_in_passing_comes_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint_schedule, "CheckpointWriter", Broken)

    async def story() -> None:
        schedule = CheckpointSchedule(Fleet(5.0), tmp_path, 60.0, FakeTime(), lambda: None, None)  # type: ignore[arg-type, return-value]
        schedule.save_in_passing()
        assert schedule._passing is not None
        await asyncio.wait([schedule._passing])
        with pytest.raises(ValueError, match="a bug"):
            await schedule.give_up()

    asyncio.run(asyncio.wait_for(story(), 20.0))
