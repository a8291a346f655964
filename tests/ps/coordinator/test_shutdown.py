"""What all shards must hear reaches them although its caller disconnects, and before the next job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hubring.ps.coordinator import shutdown
from tests.support.fakes.coordinator import Hub


class Slow:
    """A call to all shards that takes until `may_end` is set."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.ended = 0

    async def __call__(self, *_: Any) -> None:
        self.begun.set()
        await self.may_end.wait()
        self.ended += 1


async def slow(monkeypatch: pytest.MonkeyPatch, call: str) -> tuple[Hub, Slow]:
    """Returns a hub whose shards answer one call slowly. Its callers wait for them no moment."""
    monkeypatch.setattr(shutdown, "TURN_SECONDS", 0.0)
    hub, answer = Hub(on_loss="wait"), Slow()
    monkeypatch.setattr(hub.fleet, call, answer)
    return hub, answer


async def settled() -> None:
    """Lets all tasks go on until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("asks_again", [True, False])
async def test_a_stop_request_reaches_the_shards_although_its_call_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, asks_again: bool
) -> None:
    hub, drain = await slow(monkeypatch, "drain")
    first, _ = await hub.started()
    call = asyncio.create_task(hub.beat(first, stopping=True))
    await drain.begun.wait()
    again = asyncio.create_task(hub.beat(first, stopping=asks_again))
    await settled()
    assert again.done() != asks_again, "a stop request is answered once all shards know of it"
    call.cancel()
    drain.may_end.set()
    await again
    await settled()
    assert drain.ended == 1


async def test_a_failure_reaches_the_shards_although_its_call_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub, fail = await slow(monkeypatch, "fail")
    monkeypatch.setattr(shutdown, "TURN_SECONDS", 60.0)
    first, _ = await hub.started()
    call = asyncio.create_task(hub.leave(first, "FAILED"))
    await fail.begun.wait()
    call.cancel()
    await hub.coordinator.tick()
    fail.may_end.set()
    await settled()
    assert fail.ended == 1


@pytest.mark.parametrize("call", ["drain", "fail"])
async def test_the_next_job_waits_for_what_the_shards_are_being_told(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    hub, told = await slow(monkeypatch, call)
    first, second = await hub.started()
    stopping = asyncio.create_task(hub.beat(first, stopping=call == "drain"))
    await settled()
    for joined in (first, second):
        await hub.leave(joined, "FAILED")
    ending = asyncio.create_task(hub.coordinator.shutdown.settle(save=False))
    await settled()
    assert not ending.done()
    told.may_end.set()
    await asyncio.gather(ending, stopping)
    assert told.ended == 1


async def test_the_loss_of_a_shard_ends_what_the_shards_are_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub, drain = await slow(monkeypatch, "drain")
    first, _ = await hub.started()
    stopping = asyncio.create_task(hub.coordinator.drain())
    await drain.begun.wait()
    hub.coordinator.shard_lost("shard 0 sent no heartbeat")
    await hub.coordinator.shutdown.settle(save=False)
    await stopping
    assert drain.ended == 0
    assert (await hub.beat(first)).failed
