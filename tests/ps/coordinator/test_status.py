"""The status has what workers report, and how to replace a worker that is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from tests.support.fakes.coordinator import Hub, in_training


async def test_the_status_contains_each_workers_telemetry() -> None:
    hub, first, _ = await in_training()
    for seconds in range(5):
        sent = pb.Telemetry(
            metrics={"accuracy": 0.5},
            samples=100 * (1 + seconds),
            cpu_ns=3_000_000_000,
            memory_bytes=1 << 28,
            gpu_bytes=1 << 30,
            gpu_use=0.5,
            total_steps=900,
        )
        await hub.beat(first, step=seconds, telemetry=sent)
        hub.time.advance(1.0)
    told, other = (await hub.reporter.status())["workers"]
    assert told["metrics"] == {"accuracy": 0.5}
    assert (told["samples"], told["samples_per_second"]) == (500, 100.0)
    assert (told["gpu_use"], told["total_steps"]) == (0.5, 900)
    assert (told["cpu_seconds"], told["memory_bytes"], told["gpu_bytes"]) == (3.0, 1 << 28, 1 << 30)
    assert (other["metrics"], other["samples"], other["samples_per_second"]) == ({}, 0, 0.0)


async def test_the_slowest_worker_that_reports_progress_counts() -> None:
    hub = Hub(workers=3)
    await hub.shard()
    first, second, silent = await asyncio.gather(*map(hub.join, "abc"))
    report = hub.reporter.report([])
    assert (report["progress"], report["seconds_left"]) == (None, None)
    for tenths in range(4):
        await hub.beat(first, telemetry=pb.Telemetry(progress=0.5 + tenths / 10))
        await hub.beat(second, telemetry=pb.Telemetry(progress=tenths / 10))
        await hub.beat(silent)
        hub.time.advance(10.0)
    report = hub.reporter.report([])
    assert report["progress"] == pytest.approx(0.3)
    assert report["seconds_left"] == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("settings", "topology", "steps"),
    [
        ({}, "hub", [40, 39]),
        ({}, "ring", [40, 39]),
        ({"mode": "asp"}, "hub", [40, 7]),
        ({"mode": "backup", "backup": 1}, "hub", [40, 7]),
    ],
)
async def test_workers_that_step_together_are_at_most_one_step_apart_however_old_a_report_is(
    settings: dict[str, Any], topology: str, steps: list[int]
) -> None:
    hub = Hub(**settings)
    await hub.shard()
    joined = await asyncio.gather(*(hub.join(token, topology=topology) for token in "ab"))
    first, second = sorted(joined, key=lambda each: each.rank)
    await hub.beat(second, step=7)
    await hub.beat(first, step=40)
    report = hub.reporter.report([])
    assert [row["step"] for row in report["workers"]] == steps
    assert report["step"] == steps[1]


@pytest.mark.parametrize(
    ("settings", "topology", "replaced"),
    [({}, "hub", ["1"]), ({"on_loss": "wait"}, "hub", []), ({}, "ring", [])],
)
async def test_a_lost_worker_comes_with_the_command_that_replaces_it(
    settings: dict[str, Any], topology: str, replaced: list[str]
) -> None:
    hub = Hub(workers=3, lease=5.0, port=5577, **settings)
    await hub.shard()
    joined = await asyncio.gather(*(hub.join(token, topology=topology) for token in "abc"))
    one = {each.rank: each for each in joined}
    assert hub.reporter.report([])["replace"] == {}
    hub.time.advance(4.0)
    await hub.beat(one[0])
    await hub.leave(one[2])
    await hub.tick_after(4.0)
    found = hub.reporter.report([])["replace"]
    assert list(found) == replaced, "rank 2 has finished"
    assert set(found.values()) <= {"ps-worker --server 127.0.0.1:5577 --rank 1 train.py"}
    if replaced:
        assert (await hub.join("d", rank=1)).state == pb.JoinReply.READY
        assert hub.reporter.report([])["replace"] == {}
