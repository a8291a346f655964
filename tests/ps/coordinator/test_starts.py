"""A job that loses a worker before its workers have exchanged anything waits for all of them again."""

from __future__ import annotations

import asyncio

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.job.generations import MEETING
from hubring.ps.job.membership import RETURN_SECONDS
from tests.support.fakes.coordinator import CONTEXT, Hub, vanish

pytestmark = pytest.mark.usefixtures("impatient")


async def lose(hub: Hub, joined: pb.JoinReply) -> None:
    await vanish(hub, joined)
    await hub.tick_after(RETURN_SECONDS + 0.1)


async def one_lost(**settings: object) -> tuple[Hub, pb.JoinReply]:
    """Returns a hub whose second worker was killed, and the first."""
    hub = Hub(**settings)
    hub.fleet.used = False
    first, second = await hub.started()
    await lose(hub, second)
    return hub, first


async def test_the_shards_of_a_job_that_waits_again_stay_the_same() -> None:
    hub, _ = await one_lost()
    assert (await hub.shard("late")).lease_seconds == 0


async def test_a_job_whose_workers_all_leave_before_an_exchange_ends_and_clears_the_shards() -> None:
    """Else the shards would take the next job's first view for an old one."""
    hub, first = await one_lost(once=True)
    await hub.leave(first, "FAILED")
    await hub.coordinator.tick()
    assert hub.coordinator.done.is_set()


@pytest.mark.parametrize("all_come", [True, False])
async def test_a_ring_fails_once_it_may_have_connected_with_the_lost_worker(all_come: bool) -> None:
    """It connects once all its workers have come to their first exchange, not to one that was just killed."""
    hub = Hub()
    hub.fleet.used = False
    first, second = await asyncio.gather(*(hub.join(name, topology="ring") for name in "ab"))
    for one in (second, first):
        if one is first and not all_come:
            await vanish(hub, second)
        here = pb.RendezvousRequest(rank=one.rank, key=f"{MEETING}/{one.rank}", value="here")
        here.incarnation = one.incarnation
        await hub.control.Rendezvous(here, CONTEXT)
    look = pb.RendezvousRequest(rank=first.rank, incarnation=first.incarnation, key=f"{MEETING}/1")
    assert (await hub.control.Rendezvous(look, CONTEXT)).value == ("here" if all_come else "")
    await lose(hub, second)
    assert ("a ring cannot continue without it" in str(hub.coordinator.job.failure)) == all_come
    assert f"{MEETING}/1" not in hub.coordinator.rendezvous.values


async def test_a_worker_that_is_only_silent_may_still_exchange_so_its_rank_is_not_free() -> None:
    hub = Hub(on_loss="wait", lease=10.0)
    hub.fleet.used = False
    first, _ = await hub.started()
    hub.time.advance(16.0)
    await hub.beat(first)
    await hub.coordinator.tick()
    assert "with --on-loss wait the job cannot continue" in str(hub.coordinator.job.failure)
