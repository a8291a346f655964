"""Standbys that get a shard's state, and what becomes of a stream if a process is lost meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hubring.ps.coordinator.failover.standbys import PAIR_SECONDS
from tests.support.fakes.coordinator import run
from tests.support.fakes.standbys import Story, calls, gives_up, kill, process

KILLED = "was killed by signal 9 (SIGKILL)"


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
