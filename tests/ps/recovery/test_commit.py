from __future__ import annotations

import asyncio
import logging
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub, add_ControlServicer_to_server
from hubring.ps.recovery.coordinator_state import ServerRecord, ServerState, capture, steps_of
from hubring.ps.recovery.succession import CommitFirst, Commits, StateFile
from tests.support.fakes.coordinator import LIMIT, Hub


def commits(hub: Hub, path: Path) -> Commits:
    server = ServerRecord(5555, [], None, None, [])
    return Commits(
        StateFile(path), lambda: ServerState(server, capture(hub.coordinator), steps_of(hub.coordinator))
    )


async def test_a_change_is_written_and_a_heartbeat_alone_is_not(tmp_path: Path) -> None:
    hub, path = Hub(), tmp_path / "state"
    writer = commits(hub, path)
    first, _ = await hub.started()
    writer.commit()
    written = path.read_bytes()
    await hub.beat(first, step=5)
    writer.commit()
    assert path.read_bytes() == written
    await hub.leave(first)
    writer.commit()
    assert path.read_bytes() != written
    assert StateFile(path).read().steps == {0: 0, 1: 0}, "a departure reports the completed steps"


async def test_replies_that_leave_together_share_a_commit(tmp_path: Path) -> None:
    hub, path, captured = Hub(), tmp_path / "state", 0

    def capture_it() -> ServerState:
        nonlocal captured
        captured += 1
        return ServerState(ServerRecord(5555, [], None, None, []), capture(hub.coordinator), {})

    writer = Commits(StateFile(path), capture_it)
    waiting = [asyncio.create_task(writer.settle()) for _ in range(5)]
    await asyncio.sleep(0)  # all wait now
    await hub.shard()
    await asyncio.gather(*waiting)
    assert captured == 1
    assert len(StateFile(path).read().hub.shards) == 1
    await writer.settle()
    assert captured == 2


async def test_a_held_up_commit_delays_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writer = commits(Hub(), tmp_path / "state")
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", partial(next, count(0.0, 3600.0)))
        writer.commit()
    await asyncio.wait_for(writer.settle(), LIMIT)


async def test_a_state_that_cannot_be_written_is_removed_and_reported_once_and_written_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub, path = Hub(), tmp_path / "state"
    writer = commits(hub, path)
    writer.commit()
    assert path.exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr("hubring.ps.security.private_file.replace", full)
        hub.coordinator.stopping = True
        writer.commit()
        writer.commit()
    assert [record.getMessage().partition(" (")[2] for record in caplog.records] == [
        "No space left on device): while that lasts, the job ends if the coordinator is killed"
    ]
    assert not path.exists()
    hub.coordinator.stopping = False  # as in the last state that was written
    writer.commit()
    assert path.exists()


async def test_the_state_is_written_before_a_reply_that_may_tell_of_a_change() -> None:
    count, hub = 0, Hub()
    first, _ = await hub.started()

    async def settle() -> None:
        nonlocal count
        count += 1

    server = grpc.aio.server(interceptors=[CommitFirst(settle)])
    add_ControlServicer_to_server(hub.control, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = ControlStub(channel)
        place: Any = {"rank": first.rank, "incarnation": first.incarnation}
        calls: list[tuple[Any, Any, int]] = [
            (stub.Heartbeat, pb.HeartbeatRequest(**place, step=3, loss=0.5), 0),
            (stub.Heartbeat, pb.HeartbeatRequest(**place, stop_after=4), 1),
            (stub.Heartbeat, pb.HeartbeatRequest(**place, stopping=True), 1),
            (stub.Rendezvous, pb.RendezvousRequest(**place, key="k", value="v"), 1),
            (stub.Rendezvous, pb.RendezvousRequest(**place, key="k", wait_seconds=1), 0),
            (stub.ShardHeartbeat, pb.ShardHeartbeatRequest(token="t", stream=b"s"), 0),
            (stub.ShardHeartbeat, pb.ShardHeartbeatRequest(token="t", stream=b"s", unreachable=True), 1),
            (stub.Leave, pb.LeaveRequest(**place), 1),
        ]
        for call, request, changes in calls:
            before = count
            await call(request, timeout=10)
            assert count - before == changes, request
    await server.stop(None)
