"""Exports a hub's status as Prometheus metrics.

Law: METRICS names every metric once. The export and deploy/METRICS.md are made from it. The job bounds
the number of label values: they are ranks, shards, words from fixed lists, or the names of a worker's first
metrics. An unknown number (the loss before the first report, the counters of a dead shard) is omitted, never
zero.

`python -m hubring.ps.observe.metrics > deploy/METRICS.md` writes that page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Content type of `exposition`: the text format that every Prometheus version reads."""

STALENESS_BUCKETS = (0.0, *(2.0**power for power in range(12)))
"""Upper bounds in versions, inclusive. One more bucket takes the rest."""

Report = Mapping[str, Any]
"""The return value of `StatusReporter.status()`."""

Labels = tuple[str, ...]
Reading = tuple[Labels, Any]
"""The labels' values and a number. For a histogram: a mapping of values to their counts."""
Read = Callable[[Report], Iterable[Reading]]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Metric(NamedTuple):
    """A metric, as exported and documented."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: Labels
    read: Read
    """Extracts the readings from a status."""
    help: str


def exposition(report: Report) -> bytes:
    """Returns a hub's status in Prometheus's text format.

    Args:
        report: From `StatusReporter.status()`.
    """
    return generate_latest(_Collector(report))


def document() -> str:
    """Returns the Markdown page that lists all metrics."""
    rows = [
        f"| `{metric.name}` | {metric.type} | {', '.join(metric.labels)} | {metric.help} |"
        for metric in METRICS
    ]
    return _PAGE.format(rows="\n".join(rows))


# Functions that read the status.


def _one(value: Callable[[Report], Any]) -> Read:
    """Reads a number or flag of the hub; no reading if it is None."""

    def read(report: Report) -> Iterator[Reading]:
        if (found := value(report)) is not None:
            yield (), found

    return read


def _hub(key: str) -> Read:
    return _one(itemgetter(key))


def _total(what: str) -> Read:
    return lambda report: [((word,), count) for word, count in report["totals"][what].items()]


def _info(report: Report) -> Iterator[Reading]:
    topology = report["topology"] or "none"
    yield (report["version"], str(report["protocol"]), report["mode"], topology), 1


def _rows(rows: str, label: str, key: str, keep: Callable[[Report], Any] = lambda _: True) -> Read:
    """Reads one column of a table in the status; no reading for a row without it, or that is not kept."""

    def read(report: Report) -> Iterator[Reading]:
        for row in report[rows]:
            if keep(row) and row.get(key) is not None:
                yield (str(row[label]),), row[key]

    return read


_workers = partial(_rows, "workers", "rank")
_shards = partial(_rows, "shards", "shard", keep=lambda row: "error" not in row)
"""Only of shards that answer. The values of other shards are old."""
_versions = partial(_rows, "shards", "shard", keep=lambda row: "error" not in row and row["keys"])
"""Only of shards that hold slices. The versions of other shards would stay at 0."""


def _known(read: Read) -> Read:
    """Reads the same where 0 means that the number is not known."""
    return lambda report: ((labels, value) for labels, value in read(report) if value)


def _metrics(report: Report) -> Iterator[Reading]:
    for row in report["workers"]:
        for name, value in row["metrics"].items():
            yield (str(row["rank"]), name), value


def _shards_up(report: Report) -> Iterator[Reading]:
    return (((str(row["shard"]),), "error" not in row) for row in report["shards"])


def _refused(report: Report) -> Iterator[Reading]:
    for (shard,), reasons in _shards("refused")(report):
        yield from (((shard, reason), count) for reason, count in reasons.items())


def _held(report: Report) -> Iterator[Reading]:
    present = [str(row["rank"]) for row in report["workers"]]
    for (shard,), ranks in _shards("held_seconds")(report):
        # The slowest worker is never held, but users look for it: report 0. Omit workers that left.
        for rank in present:
            yield (shard, rank), ranks.get(rank, 0.0)


# fmt: off
METRICS = (
    # The hub and its job.
    Metric("ps_info", "gauge", ("version", "protocol", "mode", "topology"), _info,
           "Always 1. The labels describe the hub. `topology` is none until the first worker joins."),
    Metric("ps_uptime_seconds", "gauge", (), _hub("seconds_up"),
           "Time since the hub started."),
    Metric("ps_running", "gauge", (), _one(lambda report: report["state"] == "running"),
           "1 while a job runs: all of its workers joined and it has not failed."),
    Metric("ps_failed", "gauge", (), _one(lambda report: bool(report["failure"])),
           "1 if the job or the hub has failed."),
    Metric("ps_draining", "gauge", (), _hub("draining"),
           "1 while the hub asks all workers to stop after their step."),
    Metric("ps_ends_with_job", "gauge", (), _hub("ends_with_job"),
           "1 if the hub exits when its job finishes: it has `--once`, or it was asked to stop."),
    Metric("ps_epoch", "gauge", (), _hub("epoch"),
           "Increases with every change of the members, from 1. 0 before the job starts."),
    Metric("ps_ring_generation", "gauge", (), _hub("ring_generation"),
           "Ring with `--min-workers`: increases when members are lost or enter, from 1."),
    Metric("ps_ring_pause_seconds", "gauge", (), _hub("ring_pause"),
           "Ring with `--min-workers`: how long the members met before this generation."),
    Metric("ps_world_size", "gauge", (), _hub("world_size"),
           "Workers that the job needs. 0 while this is unknown."),
    Metric("ps_workers", "gauge", (), _one(lambda report: len(report["workers"])),
           "Workers in the job now."),
    Metric("ps_workers_left_total", "counter", ("how",), _total("workers"),
           "Workers that left the job, by how: finished, preempted, failed or lost."),
    Metric("ps_jobs_total", "counter", ("result",), _total("jobs"),
           "Jobs that ended, by result: finished, preempted or failed."),
    Metric("ps_refused_total", "counter", ("reason",), _total("refused"),
           "What the server refused, by reason: no `token`, or beyond a bound, such as `world size`."),
    Metric("ps_failovers_total", "counter", (), _hub("failovers"),
           "Shards and coordinators that a standby has replaced (`--standby`)."),
    # A worker that resumes reports 0 before the checkpoint's step. The rate would show a jump.
    Metric("ps_steps_total", "counter", (), _known(_hub("step")),
           "Steps that all workers have completed, also those before the job was resumed."),
    Metric("ps_progress_ratio", "gauge", (), _hub("progress"),
           "Part of the job that is done, from 0 to 1, if the script reports `progress` or `total_steps`."),
    Metric("ps_left_seconds", "gauge", (), _hub("seconds_left"),
           "Estimated time until the job ends, from `ps_progress_ratio`."),
    Metric("ps_lease_seconds", "gauge", (), _hub("lease_seconds"),
           "Time without a heartbeat after which a worker or a shard is lost."),
    Metric("ps_checkpoints_total", "counter", (), _hub("checkpoints"),
           "Checkpoints that the hub wrote."),
    Metric("ps_checkpoint_age_seconds", "gauge", (), _hub("checkpoint_age"),
           "Time since the last checkpoint; without one, since the hub was ready for the job. Omitted unless"
           " a job runs whose parameters the hub saves."),
    Metric("ps_checkpoint_interval_seconds", "gauge", (), _hub("checkpoint_every"),
           "Configured time between checkpoints."),
    # Workers.
    Metric("ps_worker_steps_total", "counter", ("rank",), _known(_workers("step")),
           "Steps that the worker has completed, counted like `ps_steps_total`."),
    Metric("ps_worker_steps_per_second", "gauge", ("rank",), _workers("steps_per_second"),
           "The worker's speed over the last few seconds."),
    Metric("ps_worker_loss", "gauge", ("rank",), _workers("loss"),
           "The loss that the script reported last. Omitted if it is not finite."),
    Metric("ps_worker_metric", "gauge", ("rank", "metric"), _metrics,
           "The last value of each reported number, at most 12 of them, and the learning rate as `lr`."),
    Metric("ps_worker_samples_total", "counter", ("rank",), _known(_workers("samples")),
           "Training samples that the script reported."),
    Metric("ps_worker_cpu_seconds_total", "counter", ("rank",), _known(_workers("cpu_seconds")),
           "CPU time of the worker's process, without child processes."),
    Metric("ps_worker_memory_bytes", "gauge", ("rank",), _known(_workers("memory_bytes")),
           "Resident memory, including shared memory."),
    Metric("ps_worker_gpu_memory_bytes", "gauge", ("rank",), _known(_workers("gpu_bytes")),
           "GPU memory that torch holds."),
    Metric("ps_worker_waiting_seconds", "gauge", ("rank",), _workers("seconds_waiting"),
           "Time that the worker has waited for others. 0 while it computes."),
    Metric("ps_worker_heartbeat_age_seconds", "gauge", ("rank",),
           _workers("seconds_since_heartbeat"),
           "Time since the last heartbeat; workers send one per second, more with a short lease."),
    # Shards.
    Metric("ps_shards", "gauge", (), _one(lambda report: len(report["shards"])),
           "Registered shards."),
    Metric("ps_shards_wanted", "gauge", (), _hub("shards_wanted"),
           "Shards that the job needs to start. 0 for a ring."),
    Metric("ps_shard_standbys", "gauge", (),
           _one(lambda report: sum(row.get("standby") is not None for row in report["shards"])),
           "Shards that a standby can replace without a lost step (`--standby`)."),
    Metric("ps_shard_up", "gauge", ("shard",), _shards_up,
           "1 if the shard answered within a second. If not, its other metrics are omitted."),
    Metric("ps_shard_heartbeat_age_seconds", "gauge", ("shard",),
           _rows("shards", "shard", "seconds_since_heartbeat"),
           "Time since the shard's last heartbeat."),
    Metric("ps_shard_pushes_total", "counter", ("shard",), _shards("pushes"),
           "Gradients that were counted, or will be when their round closes."),
    Metric("ps_shard_duplicates_total", "counter", ("shard",), _shards("duplicates"),
           "Repeated pushes, which are not counted again."),
    Metric("ps_shard_dropped_total", "counter", ("shard",), _shards("dropped"),
           "Pushes that were too late for their round (`--mode backup`)."),
    Metric("ps_shard_damaged_total", "counter", ("shard",), _shards("damaged"),
           "Messages with a wrong checksum, which were sent again."),
    Metric("ps_shard_refused_total", "counter", ("shard", "reason"), _refused,
           "What the shard refused, by reason: no `token`, or beyond a bound, such as `streams`."),
    Metric("ps_shard_received_bytes_total", "counter", ("shard",), _shards("bytes_in"),
           "Payload from workers, without headers."),
    Metric("ps_shard_sent_bytes_total", "counter", ("shard",), _shards("bytes_out"),
           "Payload to workers, without headers."),
    Metric("ps_shard_queued_seconds_total", "counter", ("shard",), _shards("queued_seconds"),
           "Time that requests waited for other requests received with them."),
    Metric("ps_shard_handled_seconds_total", "counter", ("shard",), _shards("handled_seconds"),
           "Time spent on reading requests, updating and answering."),
    Metric("ps_shard_held_seconds_total", "counter", ("shard", "rank"), _held,
           "Time that the mode held back answers to this worker; concurrent ones add up."),
    Metric("ps_shard_cpu_seconds_total", "counter", ("shard",), _shards("cpu_seconds"),
           "CPU time of the shard's process."),
    Metric("ps_shard_peak_bytes", "gauge", ("shard",), _shards("peak_bytes"),
           "Peak memory of the shard's process."),
    Metric("ps_shard_memory_bytes", "gauge", ("shard",), _shards("memory_bytes"),
           "Resident memory, including shared memory."),
    Metric("ps_shard_gpu_memory_bytes", "gauge", ("shard",), _known(_shards("gpu_bytes")),
           "GPU memory that torch holds."),
    Metric("ps_shard_keys", "gauge", ("shard",), _shards("keys"),
           "Slices of the model that the shard holds. 0 if the job does not use the shard."),
    Metric("ps_shard_oldest_version", "gauge", ("shard",), _versions("oldest_version"),
           "Fewest updates of any key on the shard."),
    Metric("ps_shard_newest_version", "gauge", ("shard",), _versions("newest_version"),
           "Most updates of any key on the shard."),
    Metric("ps_push_staleness", "histogram", ("shard",), _shards("staleness"),
           "Versions between a worker's read of the parameters and the update by its push."),
)
# fmt: on


class _Collector:
    """Provides the metrics and their readings to a registry."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            family = _FAMILIES[metric.type](metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(self._report):
                family.add_metric(labels, *(_buckets(value) if metric.type == "histogram" else (value,)))
            yield family


def _buckets(counts: Mapping[str, int]) -> tuple[list[tuple[str, float]], float]:
    """Returns the number of values up to each bound, and the sum of all values."""
    values = {int(value): count for value, count in counts.items()}
    below = [
        (str(bound), float(sum(count for value, count in values.items() if value <= bound)))
        for bound in STALENESS_BUCKETS
    ]
    all_of_them = ("+Inf", float(sum(values.values())))
    return [*below, all_of_them], float(sum(value * count for value, count in values.items()))


_PAGE = """\
# Metrics

`ps-server start` serves these metrics at `/metrics`, on the port of its status page.

Counters of workers and shards restart with each job; `rate()` and `increase()` allow for that.
`ps_workers_left_total`, `ps_jobs_total`, `ps_checkpoints_total`, `ps_refused_total` and `ps_failovers_total`
count from the hub's start, `ps_shard_refused_total` from the shard's. What is unknown or not used is
omitted. In a ring no gradients pass through the shards, so their counters stay 0.

| name | type | labels | meaning |
| --- | --- | --- | --- |
{rows}
"""


if __name__ == "__main__":
    print(document(), end="")
