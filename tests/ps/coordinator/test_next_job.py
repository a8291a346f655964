"""A worker that comes while the last job ends waits for its place in the next one."""

from __future__ import annotations

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.job.membership import RETURN_SECONDS
from tests.support.fakes.coordinator import Hub, vanish

pytestmark = pytest.mark.usefixtures("impatient")


async def members(hub: Hub, topology: str) -> list[pb.JoinReply]:
    await hub.shard()
    await hub.join("a", topology=topology)
    second = await hub.join("b", topology=topology)
    return [await hub.join("a", topology=topology), second]


async def begins(hub: Hub, topology: str) -> None:
    """Checks that workers of another script begin the next job."""
    await hub.coordinator.tick()
    first = await hub.join("c", job="next.py", topology=topology)
    assert "waiting for 1 of 2 workers" in first.text
    second = await hub.join("d", job="next.py", topology=topology)
    assert (second.state, second.late) == (pb.JoinReply.READY, False)
    assert hub.coordinator.job.name == "next.py"


@pytest.mark.parametrize("topology", ["hub", "ring"])
async def test_a_worker_waits_until_the_last_worker_of_a_failed_job_left(topology: str) -> None:
    hub = Hub(on_loss="wait")
    first, second = await members(hub, topology)
    await hub.leave(first, "FAILED")
    early = await hub.join("c", job="next.py", topology=topology)
    assert early.state == pb.JoinReply.WAITING
    assert "job 'train.py', which has failed: rank 1" in early.text
    assert "must leave first" in early.text
    await hub.leave(second, "FAILED")
    assert (await hub.join("c", job="next.py", topology=topology)).state == pb.JoinReply.WAITING
    await begins(hub, topology)


@pytest.mark.parametrize("topology", ["hub", "ring"])
@pytest.mark.parametrize("script", ["train.py", "next.py"])
async def test_a_worker_waits_until_killed_workers_are_given_up(topology: str, script: str) -> None:
    hub = Hub()
    for joined in await members(hub, topology):
        await vanish(hub, joined)
    early = await hub.join("c", job=script, topology=topology)
    assert early.state == pb.JoinReply.WAITING
    assert "it has 4 s to return" in early.text
    await hub.tick_after(RETURN_SECONDS + 0.1)
    await begins(hub, topology)


async def test_a_rank_of_a_killed_worker_is_waited_for_and_given() -> None:
    hub = Hub()
    first, second = await members(hub, "hub")
    await vanish(hub, second)
    assert (await hub.join("c", rank=second.rank)).state == pb.JoinReply.WAITING
    assert (await hub.join("d", rank=first.rank)).state == pb.JoinReply.WAITING
    hub.time.advance(RETURN_SECONDS + 0.1)
    await hub.beat(first)
    await hub.coordinator.tick()
    replaced = await hub.join("c", rank=second.rank)
    assert (replaced.state, replaced.late) == (pb.JoinReply.READY, True)
    refused = await hub.join("d", rank=first.rank)
    assert "already holds this rank" in refused.text


async def test_a_view_of_the_last_job_that_comes_late_hides_none_of_the_next() -> None:
    hub = Hub(workers=1)
    await hub.shard()
    first = await hub.join("a")
    last = hub.coordinator.job
    assert last.membership is not None
    await hub.leave(first, "FINISHED")
    await hub.coordinator.tick()
    last.published = 0
    await hub.fleet.publish(last)  # a shard answered late
    seen = len(hub.fleet.views)
    await hub.join("b", job="next.py")
    assert len(hub.fleet.views) > seen


async def test_a_server_for_one_job_refuses_the_next_ones_workers() -> None:
    hub = Hub(once=True, on_loss="wait")
    first, _ = await members(hub, "hub")
    await hub.leave(first, "FAILED")
    refused = await hub.join("c")
    assert (refused.state, refused.exit_code) == (pb.JoinReply.REFUSED, 69)
    assert "the job has failed" in refused.text
