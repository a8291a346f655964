from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from hubring.protos import control_pb2 as pb
from hubring.ps.observe import metrics
from hubring.ps.observe.metrics import METRICS, STALENESS_BUCKETS
from tests.support.fakes.coordinator import Hub, in_training

PAGE = Path(__file__).parents[3] / "deploy" / "METRICS.md"

Series = dict[tuple[str, ...], float]
"""A metric's values by those of its labels, in the order of their names."""


def parsed(report: dict[str, Any]) -> dict[str, Family]:
    """What is exported, by the names of the table."""
    families = text_string_to_metric_families(metrics.exposition(report).decode())
    return {family.name + "_total" * (family.type == "counter"): family for family in families}


def series(report: dict[str, Any], name: str, suffix: str = "") -> Series:
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in parsed(report)[name].samples
        if sample.name == name + suffix
    }


async def told(hub: Hub) -> dict[str, Any]:
    return await hub.reporter.status()


async def busy() -> Hub:
    """A job of two workers on one shard, in full swing."""
    hub, first, second = await in_training()
    sent = pb.Telemetry(
        metrics={"accuracy": 0.5}, progress=0.5, samples=64, cpu_ns=7_000_000_000, memory_bytes=1 << 29
    )
    await hub.beat(first, step=120, loss=0.25, waiting=3.5, telemetry=sent)
    hub.time.advance(0.5)
    await hub.beat(second, step=119, loss=float("nan"))
    hub.time.advance(0.25)
    hub.fleet.shards[0].last_stats = pb.ShardStats(
        pushes=238,
        duplicates=1,
        dropped=2,
        damaged=3,
        bytes_in=1000,
        bytes_out=2000,
        keys=3,
        oldest=119,
        newest=120,
        staleness={0: 200, 1: 30, 3: 8},
        queued_ns=1_500_000_000,
        handled_ns=2_500_000_000,
        held_ns={0: 4_000_000_000},
        cpu_ns=6_000_000_000,
        peak_bytes=1 << 28,
        memory_bytes=1 << 27,
        gpu_bytes=1 << 30,
    )
    return hub


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_tell_the_type(metric: metrics.Metric) -> None:
    assert metric.name.startswith("ps_")
    assert (metric.type == "counter") == metric.name.endswith("_total")
    assert metric.help.endswith(".")


def test_a_name_stands_for_one_metric() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_page_is_made_from_the_table() -> None:
    assert PAGE.read_text() == metrics.document(), "python -m hubring.ps.observe.metrics > deploy/METRICS.md"


async def test_a_hub_without_a_job_tells_what_is_known() -> None:
    report = await told(Hub())
    assert parsed(report).keys() == {metric.name for metric in METRICS}
    expected: dict[str, Series] = {
        "ps_running": {(): 0},
        "ps_failed": {(): 0},
        "ps_world_size": {(): 2},
        "ps_workers": {(): 0},
        "ps_shards_wanted": {(): 1},
        "ps_steps_total": {},
        "ps_shard_up": {},
        "ps_checkpoint_age_seconds": {},
        "ps_workers_left_total": {(how,): 0 for how in ("finished", "preempted", "failed", "lost")},
    }
    assert {name: series(report, name) for name in expected} == expected
    (info,) = parsed(report)["ps_info"].samples
    assert info.labels == {
        "version": report["version"],
        "protocol": str(report["protocol"]),
        "mode": "bsp",
        "topology": "none",
    }


async def test_reports_of_workers_and_shards_are_exported() -> None:
    report = await told(await busy())
    expected: dict[str, Series] = {
        "ps_running": {(): 1},
        "ps_workers": {(): 2},
        "ps_epoch": {(): 1},
        "ps_steps_total": {(): 119},
        "ps_lease_seconds": {(): 90},
        "ps_worker_steps_total": {("0",): 120, ("1",): 119},
        "ps_worker_loss": {("0",): 0.25},
        "ps_progress_ratio": {(): 0.5},
        "ps_left_seconds": {},
        "ps_worker_metric": {("accuracy", "0"): 0.5},
        "ps_worker_samples_total": {("0",): 64},
        "ps_worker_cpu_seconds_total": {("0",): 7},
        "ps_worker_memory_bytes": {("0",): 1 << 29},
        "ps_worker_gpu_memory_bytes": {},
        "ps_worker_waiting_seconds": {("0",): 3.5, ("1",): 0},
        "ps_worker_heartbeat_age_seconds": {("0",): 0.75, ("1",): 0.25},
        "ps_shards": {(): 1},
        "ps_shard_up": {("0",): 1},
        "ps_shard_pushes_total": {("0",): 238},
        "ps_shard_duplicates_total": {("0",): 1},
        "ps_shard_dropped_total": {("0",): 2},
        "ps_shard_damaged_total": {("0",): 3},
        "ps_shard_received_bytes_total": {("0",): 1000},
        "ps_shard_sent_bytes_total": {("0",): 2000},
        "ps_shard_queued_seconds_total": {("0",): 1.5},
        "ps_shard_handled_seconds_total": {("0",): 2.5},
        "ps_shard_held_seconds_total": {("0", "0"): 4, ("1", "0"): 0},
        "ps_shard_cpu_seconds_total": {("0",): 6},
        "ps_shard_peak_bytes": {("0",): 1 << 28},
        "ps_shard_memory_bytes": {("0",): 1 << 27},
        "ps_shard_gpu_memory_bytes": {("0",): 1 << 30},
        "ps_shard_keys": {("0",): 3},
        "ps_shard_oldest_version": {("0",): 119},
        "ps_shard_newest_version": {("0",): 120},
    }
    assert {name: series(report, name) for name in expected} == expected


async def test_a_worker_that_left_is_not_exported_as_a_straggler() -> None:
    report = await told(await busy())
    report["workers"] = report["workers"][1:]
    assert series(report, "ps_shard_held_seconds_total") == {("1", "0"): 0}


async def test_steps_are_left_out_until_one_is_told_lest_a_resumed_job_seem_to_leap() -> None:
    hub, first, second = await in_training(mode="asp")
    await hub.beat(first, step=500)
    report = await told(hub)
    assert series(report, "ps_worker_steps_total") == {(str(first.rank),): 500}
    assert series(report, "ps_steps_total") == {}
    await hub.beat(second, step=500)
    assert series(await told(hub), "ps_steps_total") == {(): 500}


async def test_staleness_is_a_cumulative_histogram() -> None:
    hub = await busy()
    stale = int(STALENESS_BUCKETS[-1]) + 1
    counts = {0: 200, 1: 30, 3: 8, stale: 5}
    hub.fleet.shards[0].last_stats = pb.ShardStats(staleness=counts)
    report = await told(hub)
    assert series(report, "ps_push_staleness", "_bucket") == {
        ("+Inf" if bound == math.inf else str(bound), "0"): sum(
            times for staleness, times in counts.items() if staleness <= bound
        )
        for bound in (*STALENESS_BUCKETS, math.inf)
    }
    assert series(report, "ps_push_staleness", "_count") == {("0",): 243}
    assert series(report, "ps_push_staleness", "_sum") == {("0",): 30 + 3 * 8 + 5 * stale}


async def test_a_shard_that_holds_nothing_is_at_no_version() -> None:
    hub = await busy()
    hub.fleet.shards[0].last_stats = pb.ShardStats(pushes=1)
    report = await told(hub)
    names = ("ps_shard_keys", "ps_shard_oldest_version", "ps_shard_newest_version")
    assert [series(report, name) for name in names] == [{("0",): 0}, {}, {}]


async def test_a_failed_job_is_told() -> None:
    hub = await busy()
    hub.coordinator.shard_lost("shard 0 was killed by signal 9")
    report = await told(hub)
    assert (series(report, "ps_failed"), series(report, "ps_running")) == ({(): 1}, {(): 0})


async def test_the_age_of_a_checkpoint_counts_from_the_last_that_was_written(tmp_path: Path) -> None:
    hub = Hub(workers=1, mode="asp", checkpoint_dir=tmp_path, checkpoint_every=60.0)
    await hub.shard()
    worker = await hub.join("a")
    await hub.plan(worker)
    hub.time.advance(4.0)
    age, interval = "ps_checkpoint_age_seconds", "ps_checkpoint_interval_seconds"
    assert series(await told(hub), age) == {(): 4}
    assert series(await told(hub), interval) == {(): 60}
    hub.fleet.may_save.set()
    await hub.coordinator.checkpoints.save()
    hub.time.advance(1.0)
    report = await told(hub)
    assert (series(report, age), series(report, "ps_checkpoints_total")) == ({(): 1}, {(): 1})


async def test_counts_outlive_the_job() -> None:
    hub = Hub()
    for token in ("a", "b"):
        await hub.shard()
        workers = await asyncio.gather(hub.join(f"1st of {token}"), hub.join(f"2nd of {token}"))
        await hub.leave(workers[0], "FINISHED")
        await hub.leave(workers[1], "FINISHED" if token == "a" else "FAILED")
        left = series(await told(hub), "ps_workers_left_total")
        await hub.coordinator.tick()
        report = await told(hub)
        assert series(report, "ps_workers_left_total") == left, "each worker counts once"
    assert left == {("finished",): 3, ("preempted",): 0, ("failed",): 1, ("lost",): 0}
    assert series(report, "ps_jobs_total") == {("finished",): 2, ("preempted",): 0, ("failed",): 0}
