"""Which standby follows which shard, and what becomes of either."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.failover.pairing import pairs
from hubring.ps.coordinator.failover.standbys import PAIR_SECONDS, Standbys
from hubring.ps.coordinator.shard_fleet import GUARDED_RETURN_SECONDS, Fleet, Shard, ShardSilent
from hubring.ps.security.door import OPEN
from tests.support.fakes.clock import FakeTime
from tests.support.fakes.coordinator import run


class Stub:
    """Answers all calls, until it is told not to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lives = True
        self.slow = ""
        """The name of a call that takes until `ends` is set."""
        self.ends = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any, timeout: float) -> pb.Ack:
            if not self.lives:
                none: Any = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "gone")
            self.calls.append(name)
            if name == self.slow:
                await self.ends.wait()
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

    def killed(self) -> Story:
        """Returns the story of a coordinator that takes over with what is on record."""
        later = Story(len(self.fleet.shards))
        for kind in ("shards", "standbys"):
            known = [replace(each) for each in getattr(self.fleet, kind)]
            setattr(later.fleet, kind, known)
        later.standbys.take_over()
        return later

    async def joining(self) -> tuple[Shard, Shard, bytes]:
        """Returns shard 0, the standby to which its state is on its way, and the secret of the stream."""
        shard = self.fleet.shards[0]
        stub: Any = shard.stub
        stub.slow = "Replicate"
        await self.standbys.check()
        while "Replicate" not in calls(shard):
            await asyncio.sleep(0)
        (standby,) = [each for each in self.fleet.standbys if each.stream == shard.joining]
        return shard, standby, shard.joining

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


def gives_up(hub: Story, shard: Shard, stream: bytes, *, unreachable: bool = False) -> bool:
    """Whether a shard that asks about a stream hears that its standby is given up."""
    return hub.standbys.ruling(shard.token, stream, unreachable=unreachable).given_up


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
        assert "has taken its place" in hub.standbys.ruling(shard.token, b"", unreachable=False).replaced
        assert hub.standbys.ruling(standby.token, b"", unreachable=False) == ("", False)

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
        assert not gives_up(hub, shard, b"")
        assert not gives_up(hub, shard, stream)
        assert gives_up(hub, shard, b"an earlier stream", unreachable=True)
        assert standby in hub.fleet.standbys
        assert gives_up(hub, shard, stream, unreachable=True)
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


def test_a_stream_is_on_record_before_a_shard_or_a_standby_hears_of_it() -> None:
    async def story() -> None:
        hub = Story(1)
        (shard,), (standby,) = hub.fleet.shards, hub.fleet.standbys
        recorded: list[tuple[bytes, bytes, list[str]]] = []
        hub.fleet.before_call = lambda: recorded.append((shard.joining, standby.stream, calls(standby)))
        await hub.paired()
        joining, stream, before = recorded[0]
        assert joining == stream == shard.stream != b""
        assert before == []

    run(story())


def test_a_coordinator_that_takes_over_ends_a_pairing_that_it_finds_and_begins_anew() -> None:
    async def story() -> None:
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

    run(story())


def test_a_coordinator_that_takes_over_finds_a_standby_that_has_the_state() -> None:
    async def story() -> None:
        hub = Story(1)
        shard, standby = await hub.paired()
        later = hub.killed()
        assert later.fleet.standby_of(later.fleet.shards[0]) == standby
        assert not gives_up(later, shard, shard.stream)

    run(story())


@pytest.mark.parametrize("unreachable", [False, True])
def test_a_standby_that_is_lost_while_it_joins_holds_up_neither_its_shard_nor_another_standby(
    unreachable: bool,
) -> None:
    async def story() -> None:
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

    run(story())


def test_a_standby_that_cannot_follow_is_free_again_and_tried_later() -> None:
    async def story() -> None:
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

    run(story())


def test_a_shard_learns_that_any_earlier_standby_is_given_up() -> None:
    async def story() -> None:
        hub = Story(1)
        shard, standby = await hub.paired()
        first = shard.stream
        await hub.standbys.lose(standby, KILLED)
        hub.fleet.standbys.append(process(1, standby=True))
        shard, standby, second = await hub.joining()
        await hub.standbys.lose(standby, KILLED)
        assert gives_up(hub, shard, first)
        assert gives_up(hub, shard, second)

    run(story())


def test_a_shard_hears_of_a_standby_that_is_given_up_only_once_that_is_on_record() -> None:
    async def story() -> None:
        hub = Story(1)
        _, standby = await hub.paired()
        recorded: list[bool] = []
        hub.fleet.before_call = lambda: recorded.append(standby in hub.fleet.standbys)
        await hub.standbys.lose(standby, KILLED)
        assert recorded == [False]

    run(story())
