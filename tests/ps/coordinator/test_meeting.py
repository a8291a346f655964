"""Where the members of a ring that heals meet: who is waited for, who is lost, who enters."""

from __future__ import annotations

import asyncio

import pytest

from hubring.protos import control_pb2 as pb
from tests.support.fakes.coordinator import Hub, Refused, regroup, ring, vanish


def ranks(reply: pb.RegroupReply) -> list[int]:
    return [member.rank for member in reply.members]


async def test_a_member_whose_connection_closed_is_lost_as_soon_as_the_others_meet() -> None:
    hub, (one, two, three) = await ring(3)
    await vanish(hub, two)
    await hub.coordinator.tick()
    assert len(hub.coordinator.job.members) == 3  # perhaps only its connection is lost
    replies = await asyncio.gather(
        regroup(hub, one, 1, "first", boundary=False), regroup(hub, three, 1, "third", boundary=False)
    )
    for reply in replies:
        assert (reply.generation, ranks(reply), reply.boundary) == (2, [one.rank, three.rank], False)
        assert [member.note for member in reply.members] == ["first", "third"]
    assert list(hub.coordinator.job.outcome.lost) == [two.rank]


async def test_a_member_whose_connection_closed_keeps_its_grace_while_newcomers_are_let_in() -> None:
    hub, (one, two, three) = await ring(3)
    await vanish(hub, two)
    for member in (one, three):
        assert (await regroup(hub, member, 1, wait=0.0)).generation == 0
    assert not (await hub.beat(two)).fenced
    replies = await asyncio.gather(*(regroup(hub, member, 1) for member in (one, two, three)))
    for reply in replies:
        assert ranks(reply) == [one.rank, two.rank, three.rank]
    assert not hub.coordinator.job.outcome.lost


async def test_a_member_that_is_connected_is_waited_for() -> None:
    hub, (one, two) = await ring()
    waiting = await regroup(hub, one, 1, boundary=False, wait=0.0)
    assert waiting.generation == 0
    assert (await hub.beat(two)).broken == 1
    hub.time.advance(3.0)
    first, second = await asyncio.gather(
        regroup(hub, one, 1, boundary=False), regroup(hub, two, 1, boundary=False)
    )
    assert ranks(first) == ranks(second) == [one.rank, two.rank]
    assert (await hub.beat(two)).broken == 0
    assert hub.reporter.report([])["ring_pause"] == 3.0


async def test_a_newcomer_enters_at_the_boundary_and_ranks_are_kept() -> None:
    hub, (one, two) = await ring()
    assert await hub.leave(one, "FAILED")
    assert ranks(await regroup(hub, two, 1, boundary=False)) == [two.rank]
    joiner = await hub.join("joiner", topology="ring", min_workers=1)
    assert (joiner.rank, joiner.late, joiner.ring_size) == (one.rank, True, 1)
    assert (await regroup(hub, joiner, 0, wait=0.0)).generation == 0
    assert (await hub.beat(two)).newcomers
    replies = await asyncio.gather(regroup(hub, joiner, 0), regroup(hub, two, 2))
    for reply in replies:
        assert ranks(reply) == [two.rank, joiner.rank]
        assert [member.newcomer for member in reply.members] == [False, True]
    assert not (await hub.beat(two)).newcomers


async def test_newcomers_alone_fail_the_job() -> None:
    hub, (one, two) = await ring()
    await hub.leave(one, "FAILED")
    joiner = await hub.join("joiner", topology="ring", min_workers=1)
    await hub.leave(two, "FAILED")
    reply = await regroup(hub, joiner, 0)
    assert "no worker with the state of the job is left" in reply.failed


async def test_a_newcomer_that_comes_too_late_is_told_and_the_job_has_not_failed() -> None:
    hub, (one, two, three) = await ring(3)
    await hub.leave(one, "FAILED")
    joiner = await hub.join("joiner", topology="ring", min_workers=1)
    for member in (two, three):
        await hub.leave(member)
    assert "the other workers have finished" in (await regroup(hub, joiner, 0)).failed
    assert hub.coordinator.job.failure is None


async def test_workers_must_agree_on_healing() -> None:
    hub = Hub(workers=3)
    first = asyncio.create_task(hub.join("a", topology="ring", min_workers=1))
    await asyncio.sleep(0)
    other = await hub.join("b", topology="ring")
    assert "--min-workers not set, and the job has 1" in other.text
    first.cancel()


async def test_a_ring_that_does_not_heal_has_no_meetings() -> None:
    hub = Hub()
    one, _ = await asyncio.gather(*(hub.join(name, topology="ring") for name in "ab"))
    assert "this job does not heal" in (await regroup(hub, one, 0)).failed
    stranger = pb.JoinReply(rank=0, incarnation=bytes(24))
    with pytest.raises(Refused):
        await regroup(hub, stranger, 0)
    long = await regroup(hub, one, 0, "x" * (65 << 10))
    assert "a note of" in long.failed


async def test_neither_a_lost_newcomer_nor_a_member_that_finished_is_waited_for() -> None:
    hub, (one, two, three) = await ring(3)
    await hub.leave(one, "FAILED")
    await asyncio.gather(*(regroup(hub, member, 1, boundary=False) for member in (two, three)))
    joiner = await hub.join("joiner", topology="ring", min_workers=1)
    assert (await regroup(hub, joiner, 0, wait=0.0)).generation == 0
    await hub.leave(joiner, "FAILED")
    await hub.leave(two)
    assert (await hub.beat(three)).broken == 0
    assert ranks(await regroup(hub, three, 2)) == [three.rank]
