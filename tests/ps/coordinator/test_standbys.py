"""Which standby follows which shard, and what becomes of either."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.failover.pairing import pairs
from hubring.ps.coordinator.failover.standbys import Standbys
from hubring.ps.coordinator.shard_fleet import GUARDED_RETURN_SECONDS, Fleet, Shard, ShardSilent
from hubring.ps.security.door import OPEN
from tests.support.fakes.clock import FakeTime
from tests.support.fakes.coordinator import run


class Stub:
    """Answers all calls, until it is told not to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lives = True

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any, timeout: float) -> pb.Ack:
            if not self.lives:
                none: Any = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "gone")
            self.calls.append(name)
            return pb.Ack()

        return call


class Channel:
    async def close(self) -> None:
        """Does nothing."""


def process(index: int, host: str = "here", *, standby: bool = False) -> Shard:
    none: Any = Channel()
    pid = index + 100 * standby
    stub: Any = Stub()
    return Shard(index, f"token {pid}", host, pid, host, {}, OPEN, none, stub, 0.0, standby=standby)


class Story:
    """A fleet of shards, all on one host, and their standbys."""

    def __init__(self, shards: int = 2) -> None:
        self.time = FakeTime()
        self.fleet = Fleet(90.0)
        self.failures: list[str] = []
        self.news: list[str] = []
        self.standbys = Standbys(shards, self.fleet, self.time, self.failures.append, self.news.append)
        self.fleet.shards = [process(index) for index in range(shards)]
        self.fleet.standbys = [process(index, standby=True) for index in range(shards)]
        for each in (*self.fleet.shards, *self.fleet.standbys):
            each.heard = self.time.now()

    async def checked(self) -> None:
        """Returns once every shard has its standby."""
        while not await self.standbys.check():
            await asyncio.sleep(0)

    async def paired(self) -> tuple[Shard, Shard]:
        """Returns shard 0 and its standby."""
        await self.checked()
        standby = self.fleet.standby_of(self.fleet.shards[0])
        assert standby is not None
        return self.fleet.shards[0], standby


def calls(process: Shard) -> list[str]:
    stub: Any = process.stub
    return list(stub.calls)


def kill(process: Shard) -> None:
    stub: Any = process.stub
    stub.lives = False


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
    found = pairs([process(0, host) for host in shards], [process(0, host) for host in standbys])
    assert len(found) == min(len(shards), len(standbys))
    assert len({id(standby) for _, standby in found}) == len(found)
    assert sum(shard.host == standby.host for shard, standby in found) == same


def test_no_job_begins_before_every_shard_has_its_standby() -> None:
    async def story() -> None:
        hub = Story()
        late = hub.fleet.standbys.pop()
        assert not await hub.standbys.check()
        assert calls(hub.fleet.shards[0]) == []
        hub.fleet.standbys.append(late)
        shard, standby = await hub.paired()
        assert hub.fleet.guarded
        assert (calls(shard), calls(standby)) == (["Replicate"], ["Follow"])
        assert not await hub.standbys.check()

    run(story())


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
def test_a_call_to_a_frozen_shard_goes_to_its_standby_unless_its_caller_gave_up(given_up: bool) -> None:
    async def story() -> None:
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

    run(story())


KILLED = "was killed by signal 9 (SIGKILL)"


def test_a_standby_takes_the_place_of_a_lost_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.failover.standbys.socket.gethostname", lambda: "here")

    async def story() -> None:
        hub = Story()
        shard, standby = await hub.paired()
        assert await hub.standbys.child_ended(shard.pid, "a shard process", KILLED)
        assert hub.fleet.shards[0] is standby
        assert (calls(standby)[-1], hub.standbys.failovers, hub.failures) == ("Promote", 1, [])
        assert f"{KILLED}; its standby (here pid 100) has taken its place" in hub.news[0]
        assert "has taken its place" in hub.standbys.ruling(shard.token, b"").replaced
        assert hub.standbys.ruling(standby.token, b"") == ("", b"")

    run(story())


def test_without_its_standby_a_lost_shard_fails_the_job() -> None:
    async def story() -> None:
        hub = Story()
        shard, standby = await hub.paired()
        kill(standby)
        await hub.standbys.lose(shard, "was killed")
        assert hub.failures == ["shard 0 (here pid 0) was killed"]
        assert hub.standbys.failovers == 0

    run(story())


def test_a_standby_that_cannot_be_reached_is_given_up_for_good() -> None:
    async def story() -> None:
        hub = Story()
        shard, standby = await hub.paired()
        stream = shard.stream
        assert hub.standbys.ruling(shard.token, b"") == ("", b"")
        assert hub.standbys.ruling(shard.token, b"of an earlier stream") == ("", b"")
        assert hub.standbys.ruling(shard.token, stream) == ("", stream)
        assert standby not in hub.fleet.standbys
        await hub.standbys.lose(shard, "was killed")
        assert "Promote" not in calls(standby)
        assert hub.failures

    run(story())


def test_a_silent_shard_with_a_standby_has_little_time_to_return() -> None:
    async def story() -> None:
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

    run(story())


def test_a_call_to_a_lost_shard_goes_to_its_standby() -> None:
    async def story() -> None:
        hub = Story()
        shard, standby = await hub.paired()
        kill(shard)
        draining = asyncio.create_task(hub.fleet.drain())
        await asyncio.sleep(0)
        await hub.standbys.lose(shard, "was killed")
        await draining
        assert calls(standby)[-2:] == ["Promote", "Drain"]
        assert calls(hub.fleet.shards[1])[-1] == "Drain"

    run(story())


def test_a_call_to_a_lost_shard_without_a_standby_fails_at_once() -> None:
    async def story() -> None:
        hub = Story()
        kill(hub.fleet.shards[0])
        with pytest.raises(ShardSilent, match=r"shard 0 \(here pid 0\) does not answer"):
            await hub.fleet.drain()

    run(story())
