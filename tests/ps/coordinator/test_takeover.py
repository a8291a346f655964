from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.takeover import RECONNECT_SECONDS
from hubring.ps.core.types import Sender, incarnation_from_wire
from hubring.ps.job.membership import RETURN_SECONDS
from tests.support.fakes.coordinator import Hub, run


def sender(place: pb.JoinReply) -> Sender:
    return Sender(place.rank, incarnation_from_wire(place.incarnation))


def test_a_worker_that_does_not_connect_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        places = await hub.started()
        hub.coordinator.takeover.begin(saving=False)
        call = asyncio.create_task(hub.coordinator.connections.hold(sender(places[0]), ""))
        await asyncio.sleep(0)
        for place in places:
            await hub.beat(place)  # rank 1 sent it before it died
        hub.time.advance(RECONNECT_SECONDS + 0.1)
        await hub.coordinator.tick()
        await hub.beat(places[0])
        hub.time.advance(RETURN_SECONDS - 0.1)
        await hub.coordinator.tick()
        assert len(hub.coordinator.job.members) == 2
        hub.time.advance(0.2)
        await hub.coordinator.tick()
        assert [member.rank for member in hub.coordinator.job.members] == [0]
        assert "its connection closed" in hub.coordinator.job.membership.absence(sender(places[1]))  # type: ignore[union-attr]
        call.cancel()

    run(story())


def test_members_learn_of_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        first, second = await hub.started()
        hub.coordinator.takeover.begin(saving=False)
        line = "the coordinator was lost; its standby has taken over (1 in all)"
        assert [list((await hub.beat(each)).news) for each in (first, second)] == [[line], [line]]
        assert hub.coordinator.report([])["failovers"] == 1

    run(story())


def test_a_request_to_drain_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch)
        await hub.started()
        hub.coordinator.stopping = hub.coordinator.job.draining = True  # what the killed process has left
        hub.coordinator.takeover.begin(saving=False)
        await hub.coordinator.tick()
        await hub.coordinator.tick()
        assert hub.fleet.drains == 1

    run(story())


def test_a_save_in_progress_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def story() -> None:
        hub = Hub(monkeypatch, checkpoint_dir=tmp_path)
        first, second = await hub.started()
        for place in (first, second):
            await hub.plan(place)
        await hub.coordinator.tick()
        assert hub.fleet.saves.empty()
        hub.coordinator.takeover.begin(saving=True)
        hub.fleet.may_save.set()
        await hub.coordinator.tick()
        assert await hub.fleet.saves.get() == 1
        await hub.coordinator.checkpoints.give_up()

    run(story())
