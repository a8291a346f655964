"""A coordinator that was replaced answers like one that was not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator.control_service import Control
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.status import StatusReporter
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import incarnation_from_wire
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.recovery.coordinator_state import ServerRecord, ServerState, capture, restore, steps_of
from hubring.ps.recovery.succession import decode_state, encode_state
from tests.support.fakes.coordinator import BUCKET, CONTEXT, FakeFleet, Hub, Refused, run

LEASE = 0.05
"""Seconds, also real ones for calls that wait."""
SERVER = ServerRecord(5555, [], None, None, [])
TOKENS = "abc"

token = st.sampled_from(TOKENS)
operation = st.one_of(
    st.tuples(st.just("shard"), st.sampled_from(["s", "t"])),
    st.tuples(st.just("join"), token, st.sampled_from([-1, -1, 0, 1])),
    st.tuples(st.just("beat"), token, st.integers(0, 9), st.sampled_from([0, 0, 5]), st.booleans()),
    st.tuples(st.just("plan"), token, st.sampled_from([0, 8, 64]), st.integers(0, 2)),
    st.tuples(st.just("leave"), token, st.sampled_from([reason.name for reason in LeaveReason])),
    st.tuples(st.just("put"), token, st.sampled_from(["k", "l"]), st.sampled_from(["", "v", "w"])),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.0, 1.0])),
    st.tuples(st.just("drain")),
    st.tuples(st.just("lose")),
    st.tuples(st.just("end")),
)


def taken_over(hub: Hub) -> None:
    """Replaces a hub's coordinator by one that has only its state."""
    old = hub.coordinator
    state = decode_state(encode_state(ServerState(SERVER, capture(old), steps_of(old))))
    hub.fleet = FakeFleet(old.config.lease)
    hub.coordinator = Coordinator(old.config, hub.fleet, old.consistency, hub.time, None)
    restore(hub.coordinator, state, hub.time.now())
    hub.coordinator.take_over(saving=state.hub.saving)
    hub.reporter = StatusReporter(hub.coordinator, hub.time)
    hub.control = Control(hub.coordinator, hub.reporter)


async def test_what_workers_have_published_counts_after_a_takeover() -> None:
    hub = Hub()
    before = hub.coordinator.rendezvous
    await before.pin(1, "key", "value")
    taken_over(hub)
    after = hub.coordinator.rendezvous
    assert (after.counts, after.sizes, after.writers) == (before.counts, before.sizes, {"key": 1})
    assert after.counts == {1: 1}


async def test_a_replaced_shard_learns_of_it_after_a_takeover() -> None:
    hub = Hub()
    hub.coordinator.standbys.dismissed["shard"] = "replaced"
    taken_over(hub)
    assert hub.coordinator.standbys.answer(pb.ShardHeartbeatRequest(token="shard")).dismissed == "replaced"


class Caller:
    """Makes the calls of workers and shards, and notes the answers."""

    def __init__(self, hub: Hub, topology: str) -> None:
        self.hub, self._topology = hub, topology
        self.places: dict[str, pb.JoinReply] = {}

    async def act(self, name: str, *arguments: Any) -> Any:
        try:
            return await getattr(self, name)(*arguments)
        except (Refused, ConfigError, AssertionError) as error:
            return str(error)

    async def shard(self, token: str) -> Any:
        return await self.hub.shard(token)

    async def join(self, token: str, rank: int) -> Any:
        reply = await self.hub.join(token, rank=rank, topology=self._topology, local=self._topology == "ring")
        if reply.state == pb.JoinReply.READY:
            self.places[token] = reply
        number = incarnation_from_wire(reply.incarnation) >> 128
        return reply.state, reply.text, reply.rank, number, reply.late, [each.shard for each in reply.shards]

    async def beat(self, token: str, step: int, stop_after: int, stopping: bool) -> Any:
        place = self.places.get(token, pb.JoinReply())
        reply = await self.hub.beat(place, step=step, stop_after=stop_after, stopping=stopping, waiting=1)
        news = [line for line in reply.news if not line.startswith("the coordinator was lost")]
        del reply.news[:]
        return reply, news

    async def plan(self, token: str, slice_bytes: int, trial: int) -> Any:
        place = self.places.get(token, pb.JoinReply())
        return await self.hub.plan(place, BUCKET, slice_bytes, trial=trial)

    async def leave(self, token: str, reason: str) -> Any:
        reply = await self.hub.leave(self.places.get(token, pb.JoinReply()), reason)
        del reply.news[:]
        return reply

    async def put(self, token: str, key: str, value: str) -> Any:
        place = self.places.get(token, pb.JoinReply())
        request = pb.RendezvousRequest(rank=place.rank, incarnation=place.incarnation, key=key, value=value)
        return await self.hub.control.Rendezvous(request, CONTEXT)

    async def tick(self, seconds: float) -> None:
        self.hub.time.advance(seconds)
        await self.hub.coordinator.tick()

    async def drain(self) -> None:
        await self.hub.coordinator.drain()

    async def lose(self) -> None:
        self.hub.coordinator.shard_lost("shard 0 exited")

    async def end(self) -> None:
        await self.hub.coordinator.end("a person ended it")

    def status(self) -> dict[str, Any]:
        report = self.hub.reporter.report([])
        workers = [(row["rank"], row["step"]) for row in report.pop("workers")]
        coordinator = self.hub.coordinator
        changing = ("failovers", "epoch", "progress", "seconds_left")
        return {
            **{key: value for key, value in report.items() if key not in changing},
            "workers": workers,
            "done": coordinator.done.is_set(),
            "outcome": coordinator.outcome,
            "last": (coordinator.last_job, coordinator.last_step, coordinator.last_stats),
        }


@pytest.mark.slow
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    operations=st.lists(operation, min_size=4, max_size=14),
    begun=st.booleans(),
    once=st.booleans(),
    topology=st.sampled_from(["hub", "ring"]),
)
def test_a_coordinator_that_took_over_before_every_call_answers_like_one_that_did_not(
    monkeypatch: pytest.MonkeyPatch, operations: list[tuple[Any, ...]], begun: bool, once: bool, topology: str
) -> None:
    monkeypatch.setattr("hubring.ps.coordinator.joining.PATIENCE", 0.01)
    start = [("shard", "s"), ("join", "a", 0), ("join", "b", 1), ("join", "a", 0)] if begun else []

    async def story() -> None:
        first, second = (
            Caller(Hub(lease=LEASE, once=once, on_loss="drop", slice_bytes=None), topology) for _ in range(2)
        )
        for each in [*start, *operations]:
            taken_over(second.hub)
            assert await second.act(*each) == await first.act(*each), each
            await first.hub.coordinator.tick()
            await second.hub.coordinator.tick()
            assert second.status() == first.status(), each

    run(story())
