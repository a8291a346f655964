"""Which standby follows which shard, what becomes of either, and of a stream that is interrupted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.promotion import PAIR_SECONDS, pair_on_hosts
from hubring.ps.coordinator.shard_fleet import GUARDED_RETURN_SECONDS, STALLED_LEASE_SECONDS, ShardSilent
from tests.support.fakes.standbys import Story, calls, dismissal, gives_up, kill, process


@pytest.mark.parametrize(
    ("shards", "standbys", "same"),
    [
        ("ab", "ab", 0),
        ("aabb", "aabb", 0),
        ("aab", "aab", 1),
        ("abc", "abc", 0),
        ("aa", "aa", 2),
        ("ab", "a", 0),
    ],
)
def test_pairs_are_on_two_hosts_where_there_are_enough(shards: str, standbys: str, same: int) -> None:
    found = pair_on_hosts([process(0, host) for host in shards], [process(0, host) for host in standbys])
    assert len(found) == min(len(shards), len(standbys))
    assert len({id(standby) for _, standby in found}) == len(found)
    assert sum(shard.host == standby.host for shard, standby in found) == same


async def test_no_job_begins_before_every_shard_has_its_standby() -> None:
    hub = Story()
    late = hub.fleet.standbys.pop()
    assert not await hub.standbys.check()
    assert calls(hub.fleet.shards[0]) == []
    hub.fleet.standbys.append(late)
    shard, standby = await hub.paired()
    assert hub.fleet.guarded
    assert (calls(shard), calls(standby)) == (["Replicate"], ["Follow"])
    assert not await hub.standbys.check()


class Frozen:
    """A stub that answers no call. Its channel cancels the calls when it is closed, as gRPC's does."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self.asked = asyncio.Event()

    async def close(self) -> None:
        self._closed.set()

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any, timeout: float) -> pb.Ack:
            self.asked.set()
            await self._closed.wait()
            raise asyncio.CancelledError

        return call


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_call_to_a_frozen_shard_goes_to_its_standby_unless_its_caller_gave_up(given_up: bool) -> None:
    hub = Story()
    shard, standby = await hub.paired()
    frozen: Any = Frozen()
    shard.stub = shard.channel = frozen
    draining, looking = asyncio.create_task(hub.fleet.drain()), asyncio.create_task(hub.fleet.look(9.0))
    await frozen.asked.wait()
    await asyncio.sleep(0)
    if given_up:
        draining.cancel()
    await hub.standbys.lose(shard, "sent no heartbeat")
    await asyncio.wait([draining])
    assert draining.cancelled() == given_up
    assert ("Drain" in calls(standby)) != given_up
    assert "was replaced by its standby" in (await looking)[0]
    assert (hub.standbys.failovers, hub.failures) == (1, [])
    assert all("has taken its place" in told for told in (hub.news[0], dismissal(hub, shard)))


KILLED = "was killed by signal 9 (SIGKILL)"


async def test_a_standby_that_cannot_be_reached_is_given_up_for_good() -> None:
    hub = Story()
    shard, standby = await hub.paired()
    stream = shard.stream
    assert not gives_up(hub, shard, b"")
    assert not gives_up(hub, shard, stream)
    assert gives_up(hub, shard, b"an earlier stream", unreachable=True)
    assert standby in hub.fleet.standbys
    assert gives_up(hub, shard, stream, unreachable=True)
    assert standby not in hub.fleet.standbys
    await hub.standbys.lose(shard, "was killed")
    assert "Promote" not in calls(standby)
    assert hub.failures


async def test_a_standby_for_which_its_shard_waits_is_given_up_once_it_sends_no_heartbeats() -> None:
    hub = Story(1)
    shard, standby = await hub.paired()
    stalled = pb.ShardHeartbeatRequest(token=shard.token, stream=shard.stream, stalled=True)
    for _ in range(3):  # it is busy, and lives
        hub.fleet.beat(standby.token, hub.time.now())
        assert not hub.standbys.answer(stalled).given_up
        hub.time.advance(STALLED_LEASE_SECONDS)
        await hub.standbys.check()
    hub.time.advance(0.1)
    await hub.standbys.check()
    assert hub.standbys.answer(stalled).given_up
    assert dismissal(hub, standby).startswith("this standby was given up")
    assert (hub.fleet.departed, hub.failures) == ({(standby.host, standby.pid)}, [])


async def test_a_silent_shard_with_a_standby_has_little_time_to_return() -> None:
    hub = Story()
    shard, standby = await hub.paired()
    hub.fleet.disconnect(shard.token, hub.time.now())
    hub.time.advance(GUARDED_RETURN_SECONDS + 0.1)
    await hub.standbys.check()
    assert hub.fleet.shards[0] is standby
    hub.fleet.disconnect(hub.fleet.standbys[0].token, hub.time.now())
    hub.time.advance(90.0)
    for each in hub.fleet.shards:
        each.heard = hub.time.now()
    await hub.standbys.check()
    assert (hub.fleet.standbys, hub.failures) == ([], [])


async def test_a_call_to_a_lost_shard_without_a_standby_fails_at_once() -> None:
    hub = Story()
    kill(hub.fleet.shards[0])
    with pytest.raises(ShardSilent, match=r"shard 0 \(here pid 0\) does not answer"):
        await hub.fleet.drain()


@pytest.mark.parametrize("standby", [False, True])
async def test_a_process_that_ends_before_it_registers_fails_a_job_only_if_it_is_a_shard(
    standby: bool,
) -> None:
    hub = Story(1)
    await hub.checked()
    await hub.standbys.child_ended(4711, "a process", KILLED, standby=standby)
    assert hub.failures == ([] if standby else [f"a process {KILLED}"])


@pytest.mark.parametrize("lives", [False, True])
async def test_a_standby_that_is_lost_while_it_is_promoted_is_given_up_unless_it_answers(lives: bool) -> None:
    hub = Story(1)
    shard, standby = await hub.paired()
    stub: Any = standby.stub
    stub.slow = "Promote"
    promoting = asyncio.create_task(hub.standbys.lose(shard, KILLED))
    while "Promote" not in calls(standby):
        await asyncio.sleep(0)
    losing = asyncio.create_task(hub.standbys.lose(standby, "sent no heartbeat"))
    await asyncio.sleep(0)
    stub.lives = lives
    stub.ends.set()
    await asyncio.gather(promoting, losing)
    assert hub.fleet.shards == [standby if lives else shard]
    assert hub.failures == ([] if lives else [f"shard 0 (here pid 0) {KILLED}"])
    assert hub.fleet.standbys == []


async def test_a_silent_standby_that_another_call_promotes_is_a_shard_that_lives() -> None:
    hub = Story()
    (first, second), standby = hub.fleet.shards, (await hub.paired())[1]
    silent = hub.fleet.standby_of(second)
    hub.time.advance(91.0)
    second.heard = standby.heard = hub.time.now()
    stub: Any = standby.stub
    stub.slow = "Promote"
    checking = asyncio.create_task(hub.standbys.check())
    while "Promote" not in calls(standby):
        await asyncio.sleep(0)
    losing = asyncio.create_task(hub.standbys.lose(second, KILLED))
    await asyncio.sleep(0)
    stub.ends.set()
    await asyncio.gather(checking, losing)
    assert first not in hub.fleet.shards
    assert hub.fleet.shards == [standby, silent]
    assert hub.failures == []


async def test_a_stream_is_on_record_before_a_shard_or_a_standby_hears_of_it() -> None:
    hub = Story(1)
    (shard,), (standby,) = hub.fleet.shards, hub.fleet.standbys
    recorded: list[tuple[bytes, bytes, list[str]]] = []
    hub.fleet.before_call = lambda: recorded.append((shard.joining, standby.stream, calls(standby)))
    await hub.paired()
    joining, stream, before = recorded[0]
    assert joining == stream == shard.stream != b""
    assert before == []


async def test_a_coordinator_that_takes_over_ends_a_pairing_that_it_finds_and_begins_anew() -> None:
    hub = Story(1)
    shard, _, stream = await hub.joining()
    assert not gives_up(hub, shard, stream)
    later = hub.killed()
    (shard,), (standby,) = later.fleet.shards, later.fleet.standbys
    assert gives_up(later, shard, stream)
    assert later.fleet.standby_of(shard) is None
    stub: Any = shard.stub
    stub.ends.set()
    await later.checked()
    assert later.fleet.standby_of(shard) is standby
    assert shard.stream not in (b"", stream)
    assert gives_up(later, shard, stream)


async def test_a_coordinator_that_takes_over_finds_a_standby_that_has_the_state() -> None:
    hub = Story(1)
    shard, _ = await hub.paired()
    later = hub.killed()
    assert later.fleet.standby_of(later.fleet.shards[0]) is later.fleet.standbys[0]
    assert not gives_up(later, shard, shard.stream)


@pytest.mark.parametrize("unreachable", [False, True])
async def test_a_standby_that_is_lost_while_it_joins_holds_up_neither_its_shard_nor_another_standby(
    unreachable: bool,
) -> None:
    hub = Story(1)
    shard, standby, stream = await hub.joining()
    if unreachable:
        assert gives_up(hub, shard, stream, unreachable=True)
    else:
        await hub.standbys.lose(standby, KILLED)
        assert gives_up(hub, shard, stream)
    assert hub.fleet.standbys == []
    stub: Any = shard.stub
    stub.ends.set()  # the shard goes on alone, and so its call returns
    hub.fleet.standbys.append(process(1, standby=True))
    await hub.checked()
    assert hub.fleet.standby_of(shard) is hub.fleet.standbys[0]
    assert gives_up(hub, shard, stream)


async def test_a_standby_that_cannot_follow_is_free_again_and_tried_later() -> None:
    hub = Story(1)
    (shard,), (standby,) = hub.fleet.shards, hub.fleet.standbys
    kill(shard)
    await hub.standbys.check()
    while shard.joining:
        await asyncio.sleep(0)
    assert (shard.stream, standby.stream) == (b"", b"")
    stub: Any = shard.stub
    stub.lives = True
    await hub.standbys.check()
    assert shard.joining == b""
    hub.time.advance(PAIR_SECONDS)
    assert await hub.paired() == (shard, standby)


async def test_a_shard_learns_that_any_earlier_standby_is_given_up() -> None:
    hub = Story(1)
    shard, standby = await hub.paired()
    first = shard.stream
    await hub.standbys.lose(standby, KILLED)
    hub.fleet.standbys.append(process(1, standby=True))
    shard, standby, second = await hub.joining()
    await hub.standbys.lose(standby, KILLED)
    assert gives_up(hub, shard, first)
    assert gives_up(hub, shard, second)


async def test_shard_and_standby_hear_that_it_is_given_up_once_that_is_on_record() -> None:
    hub = Story(1)
    _, standby = await hub.paired()
    recorded: list[bool] = []
    hub.fleet.before_call = lambda: recorded.append(standby in hub.fleet.standbys)
    assert dismissal(hub, standby) == ""
    await hub.standbys.lose(standby, KILLED)
    assert recorded == [False]
    why = dismissal(hub, standby)
    assert why.startswith("this standby was given up")
