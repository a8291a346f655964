"""What one peer can make a coordinator store, log and send on is bounded."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub, add_ControlServicer_to_server
from hubring.ps.coordinator import regroup_service
from hubring.ps.coordinator.control_service import ReadableCalls
from hubring.ps.coordinator.joining import Notifier
from hubring.ps.coordinator.regroup_service import Rendezvous
from hubring.ps.core.bounds import MESSAGE_CHARACTERS, Rejections
from hubring.ps.core.errors import UsageError
from hubring.ps.core.types import MAX_WORLD_SIZE, PROTOCOL, BucketSpec, TensorSpec
from hubring.ps.job import control_messages
from hubring.ps.job.control_messages import MAX_ADDRESSES, PARAMETER_CHARACTERS, SHARD_TOKEN
from tests.support.fakes.coordinator import CONTEXT, Hub, Refused, in_training, shard_token

RED = "\x1b[31m"


def refused(hub: Hub) -> dict[str, int]:
    return hub.reporter.report([])["totals"]["refused"]


@pytest.mark.parametrize("size", [MAX_WORLD_SIZE + 1, 20_000_000, 2**32 - 1])
async def test_a_world_that_is_too_large_is_refused_before_it_is_made(size: int) -> None:
    hub = Hub(workers=0)
    reply = await hub.join("a", world_size=size)
    assert reply.state == pb.JoinReply.REFUSED
    assert f"starts {size} workers, but a job has at most {MAX_WORLD_SIZE}" in reply.text
    assert hub.coordinator.job.membership is None
    assert refused(hub) == {"world size": 1}


@pytest.mark.usefixtures("impatient")
async def test_a_waiting_worker_of_the_largest_world_hears_of_few_ranks() -> None:
    hub = Hub(workers=MAX_WORLD_SIZE)
    reply = await hub.join("a")
    assert f"waiting for {MAX_WORLD_SIZE - 1} of {MAX_WORLD_SIZE} workers (ranks 1, 2, 3" in reply.text
    assert "and 4079 more not started yet" in reply.text
    assert len(reply.text) < 300


@pytest.mark.parametrize("token", ["", "t", "t" * (SHARD_TOKEN + 1), RED.ljust(32, "t"), RED.ljust(64, "t")])
async def test_a_token_is_printable_and_as_long_as_those_of_workers_and_shards(token: str) -> None:
    """Two workers with an empty token would share a rank."""

    hub = Hub()
    worker = pb.JoinRequest(protocol=PROTOCOL, token=token, topology="hub", rank=-1)
    shard = pb.RegisterShardRequest(protocol=PROTOCOL, token=token, addresses={"grpc": "127.0.0.1:1"})
    assert (await hub.control.Join(worker, CONTEXT)).state == pb.JoinReply.REFUSED
    assert "token" in (await hub.control.RegisterShard(shard, CONTEXT)).refused
    assert refused(hub) == {"text": 2}


async def test_a_flood_of_refused_workers_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub()
    for _ in range(1000):
        await hub.join("t" * 100)
    assert refused(hub) == {"text": 1000}
    assert len(caplog.records) < 20


async def test_names_of_a_peer_are_cleaned_before_they_are_logged_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        hub = Hub(workers=1)
        await hub.shard()
        joined = await hub.join("a", job=f"{RED}train.py", host=f"node\n{RED}fake line")
        await hub.beat(joined, telemetry=pb.Telemetry(metrics={f"{RED}accuracy": 1.0}), shard_ended=f"{RED}x")
        report = hub.reporter.report([])
        assert report["job"] == "�train.py"
        assert report["workers"][0]["host"] == "node��fake line"
        assert report["workers"][0]["metrics"] == {"�accuracy": 1.0}
        reply = await hub.control.Leave(
            pb.LeaveRequest(
                rank=joined.rank,
                incarnation=joined.incarnation,
                reason=pb.LeaveRequest.FAILED,
                text=f"{RED}first\nsecond" + "x" * 1_000_000,
            ),
            CONTEXT,
        )
        assert "\x1b" not in reply.failed + reply.awaits
        why = hub.coordinator.job.outcome.failed[joined.rank]
        assert why.startswith("�first\nsecond")
        assert len(why) <= MESSAGE_CHARACTERS
    assert "node" in caplog.text
    assert "\x1b" not in caplog.text


def shaped(*shape: int) -> BucketSpec:
    return BucketSpec(0, "float32", "SGD", (TensorSpec("w", shape),))


@pytest.mark.parametrize(
    ("bucket", "reason", "says"),
    [
        (BucketSpec(0, "float32", "SGD", (TensorSpec("w" * (PARAMETER_CHARACTERS + 1), (4,)),)), "text", ""),
        (BucketSpec(0, "float32", "SGD", (TensorSpec(f"{RED}w", (4,)),)), "text", ""),
        (BucketSpec(0, f"{RED}float32", "SGD", (TensorSpec("w", (4,)),)), "text", ""),
        (BucketSpec(0, "float32", "S" * 1000, (TensorSpec("w", (4,)),)), "text", ""),
        (shaped(-4), "model", "parameter w has the shape [-4"),
        (shaped(2, -4), "model", "parameter w has the shape [2"),
        (shaped(1 << 24, 1 << 24), "model", "parameter w has the shape [16777216"),
        (shaped(*[1] * 65), "model", "parameter w has the shape [1"),
        (shaped(*[1 << 62] * 1000), "model", f"parameter w has the shape [{1 << 62}"),
    ],
)
async def test_names_and_shapes_in_buckets_are_bounded(bucket: BucketSpec, reason: str, says: str) -> None:
    hub, worker, _ = await in_training()
    reply = await hub.plan(worker, bucket)
    assert f"use {'at most 64 dimensions, none negative, and at most' if says else ''}" in reply.refused
    assert says in reply.refused
    assert len(reply.refused) < 400
    assert "\x1b" not in reply.refused
    assert refused(hub) == {reason: 1}


async def test_the_parameters_of_a_model_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_messages, "MAX_PARAMETERS", 2)
    hub, worker, _ = await in_training()
    for count in (2, 3):
        tensors = tuple(TensorSpec(str(number), (4,)) for number in range(count))
        reply = await hub.plan(worker, BucketSpec(0, "float32", "SGD", tensors))
    assert "3 buckets or parameters; use at most 2" in reply.refused
    assert refused(hub) == {"model": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": {str(number): "127.0.0.1:1" for number in range(MAX_ADDRESSES + 1)}},
        {"addresses": {"grpc": "x" * 2000}},
        {"addresses": {f"{RED}grpc": "127.0.0.1:1"}},
        {"addresses": {"grpc": "127.0.0.1:1"}, "host_id": "x" * 1000},
        {},
        {"addresses": {"zmq": "127.0.0.1:1"}},
    ],
)
async def test_a_shard_has_a_grpc_address_and_few_others(changes: dict[str, Any]) -> None:
    hub = Hub()
    request = pb.RegisterShardRequest(protocol=PROTOCOL, token=shard_token("s"), **changes)
    assert (await hub.control.RegisterShard(request, CONTEXT)).refused
    assert hub.fleet.shards == []
    assert refused(hub) == {"text": 1}


async def test_the_address_of_a_gpu_is_no_longer_than_is_allowed() -> None:
    hub = Hub(insecure=True)
    of_gpu = f"GPU-44dc8bb1-c4ce-ef39-3e7a-3ef07d89c3a4/{bytes(183).hex()}"  # as seen on an H200
    request = pb.RegisterShardRequest(
        protocol=PROTOCOL, token=shard_token("s"), addresses={"grpc": "127.0.0.1:1", "cuda": of_gpu}
    )
    assert not (await hub.control.RegisterShard(request, CONTEXT)).refused


@pytest.mark.parametrize("host", ["192.0.2.1", "127.0.0.1"])
@pytest.mark.parametrize("certificate", [b"", b"a certificate"])
async def test_a_shard_without_a_certificate_is_refused(host: str, certificate: bytes) -> None:
    for insecure in (False, True):
        hub = Hub(host="192.0.2.9", insecure=insecure)
        request = pb.RegisterShardRequest(
            protocol=PROTOCOL,
            token=shard_token("s"),
            host="node1",
            addresses={"grpc": f"{host}:1"},
            door=pb.Door(certificate=certificate),
        )
        reply = await hub.control.RegisterShard(request, CONTEXT)
        refused = not certificate and not insecure
        assert ("shard on node1 proves nothing to workers" in reply.refused) is refused


async def publish(board: Rendezvous, rank: int, *values: tuple[str, str]) -> None:
    for key, value in values:
        await board.pin(rank, key, value)


async def test_the_board_holds_a_bounded_number_of_keys_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup_service, "RANK_KEYS", 2)

    board = Rendezvous(Notifier())
    await publish(board, 0, ("a", "1"), ("b", "2"), ("b", "3"))
    with pytest.raises(UsageError, match="rank 0 published 2 keys, the maximum"):
        await publish(board, 0, ("c", "4"))
    await publish(board, 1, ("c", "4"), ("a", "5"))  # takes `a` over
    await publish(board, 0, ("d", "6"))
    assert [board.values[key] for key in "abcd"] == ["5", "3", "4", "6"]


@pytest.mark.parametrize(("bound", "rank"), [("RANK_BYTES", 0), ("TOTAL_BYTES", 1)])
async def test_the_board_holds_a_bounded_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch, bound: str, rank: int
) -> None:
    monkeypatch.setattr(regroup_service, bound, 20)

    board = Rendezvous(Notifier())
    await publish(board, 0, ("a", "x" * 9), ("a", "y" * 9))
    with pytest.raises(UsageError, match="would publish 21 bytes, but the maximum is 20"):
        await publish(board, rank, ("b", "x" * 10))
    await publish(board, rank, ("b", "x" * 9), ("b", "z" * 9))


@pytest.mark.parametrize(
    ("key", "value"),
    [("k" * (regroup_service.KEY_BYTES + 1), "v"), ("k", "ü" * (regroup_service.VALUE_BYTES // 2 + 1))],
)
async def test_keys_and_values_are_bounded(key: str, value: str) -> None:
    hub, worker, _ = await in_training()
    request = pb.RendezvousRequest(rank=worker.rank, incarnation=worker.incarnation, key=key, value=value)
    with pytest.raises(Refused, match="publish at most"):
        await hub.control.Rendezvous(request, CONTEXT)
    assert refused(hub) == {"board": 1}
    ordinary = pb.RendezvousRequest(rank=worker.rank, incarnation=worker.incarnation, key="k", value="v")
    assert (await hub.control.Rendezvous(ordinary, CONTEXT)).value == "v"


async def test_only_the_last_join_wakes_the_waiting_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a start of n workers would cost n times n wake-ups."""
    announced: list[int] = []
    announce = Notifier.announce

    hub = Hub(workers=64)
    await hub.shard()

    async def counted(notifier: Notifier) -> None:
        announced.append(len(hub.coordinator.job.members))
        await announce(notifier)

    monkeypatch.setattr(Notifier, "announce", counted)
    joined = await asyncio.gather(*(hub.join(f"t{number}") for number in range(64)))
    assert sorted(each.rank for each in joined) == list(range(64))
    assert announced == [64]


@pytest.mark.parametrize("method", ["Clock", "Connect"])
async def test_a_damaged_call_is_refused_without_a_traceback(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rejections = Rejections()
    server = grpc.aio.server(interceptors=[ReadableCalls(rejections)])
    add_ControlServicer_to_server(Hub().control, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await ControlStub(channel).Clock(pb.ClockRequest(), timeout=10.0)).time_ns
        name, damaged = f"/hubring.v1.Control/{method}", b"\xff\xff"
        call: Any = channel.unary_stream(name) if method == "Connect" else channel.unary_unary(name)
        assert await call(damaged, timeout=10.0).code() is grpc.StatusCode.DATA_LOSS
    await server.stop(0)
    assert rejections.counts() == {"message": 1}
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [logging.WARNING]
    assert "its message cannot be read" in caplog.text
