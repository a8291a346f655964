"""Metrics: a hub's status in the words of Prometheus.

Law: METRICS names every metric once; what is exported and what deploy/METRICS.md
says both come from it. All that can vary in a label is bounded by the job: ranks,
shards, and words from fixed lists. A number that nobody knows (the loss before
the first report, what a dead shard counted) is left out, never zero.

`python -m hubring.ps.observe.metrics > deploy/METRICS.md` writes that page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of `exposition`: the text format that every Prometheus reads."""

STALENESS_BUCKETS = (0.0, *(2.0**power for power in range(12)))
"""Versions, each bound included; one more bucket takes the rest."""

Report = Mapping[str, Any]
"""What `Coordinator.status()` returns."""

Labels = tuple[str, ...]
Reading = tuple[Labels, Any]
"""The labels' values, and a number; for a histogram, how often which whole number occurred."""
Read = Callable[[Report], Iterable[Reading]]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_KINDS: Mapping[str, type[CounterMetricFamily] | type[GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class Metric(NamedTuple):
    """One metric, as it is exported and documented."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: Labels
    unit: str
    read: Read
    """Takes its readings out of a status."""
    help: str


def exposition(report: Report) -> bytes:
    """A hub's status in Prometheus's text format.

    Args:
        report: From `Coordinator.status()`.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(report))
    return generate_latest(registry)


def document() -> str:
    """The page that lists all metrics, in Markdown."""
    rows = [
        f"| `{metric.name}` | {metric.type} | {', '.join(metric.labels)} | {metric.unit} | {metric.help} |"
        for metric in METRICS
    ]
    return _PAGE.format(rows="\n".join(rows))


# How a metric reads the status.


def _hub(key: str) -> Read:
    """A number or a yes of the hub's own; nothing where it is None."""

    def read(report: Report) -> Iterator[Reading]:
        if report[key] is not None:
            yield (), report[key]

    return read


def _hub_is(holds: Callable[[Report], bool]) -> Read:
    return lambda report: [((), holds(report))]


def _count(rows: str) -> Read:
    return lambda report: [((), len(report[rows]))]


def _total(what: str) -> Read:
    return lambda report: [((word,), count) for word, count in report["totals"][what].items()]


def _info(report: Report) -> Iterator[Reading]:
    topology = report["topology"] or "none"
    yield (report["version"], str(report["protocol"]), report["mode"], topology), 1


def _steps(report: Report) -> Iterator[Reading]:
    # A worker that resumes tells 0 before it tells the checkpoint's step: as a rate, a leap.
    if report["step"]:
        yield (), report["step"]


def _worker_steps(report: Report) -> Iterator[Reading]:
    return ((labels, step) for labels, step in _workers("step")(report) if step)  # as above


def _workers(key: str) -> Read:
    return _rows("workers", "rank", key)


def _rows(rows: str, label: str, key: str) -> Read:
    """One column of a table in the status; what a row leaves out is not known."""

    def read(report: Report) -> Iterator[Reading]:
        for row in report[rows]:
            if row.get(key) is not None:
                yield (str(row[label]),), row[key]

    return read


def _shards(key: str) -> Read:
    """As `_rows`, of shards that answer: what another told before is old."""

    def read(report: Report) -> Iterator[Reading]:
        for row in report["shards"]:
            if "error" not in row:
                yield (str(row["shard"]),), row[key]

    return read


def _versions(key: str) -> Read:
    """As `_shards`, of those that hold something: another's would stay at 0 for ever."""
    read = _shards(key)
    return lambda report: read({"shards": [row for row in report["shards"] if row["keys"]]})


def _shards_up(report: Report) -> Iterator[Reading]:
    return (((str(row["shard"]),), "error" not in row) for row in report["shards"])


def _held(report: Report) -> Iterator[Reading]:
    present = [str(row["rank"]) for row in report["workers"]]
    for (shard,), ranks in _shards("held_seconds")(report):
        # The slowest is never held, and the one to look for: it counts 0. Who is gone holds nobody up.
        for rank in present:
            yield (shard, rank), ranks.get(rank, 0.0)


# fmt: off
METRICS = (
    # The hub and its job.
    Metric("ps_info", "gauge", ("version", "protocol", "mode", "topology"), "", _info,
           "Always 1; the labels say what this hub is. `topology` is none until the first worker says it."),
    Metric("ps_uptime_seconds", "gauge", (), "seconds", _hub("seconds_up"),
           "Seconds since the hub was started."),
    Metric("ps_running", "gauge", (), "", _hub_is(lambda report: report["state"] == "running"),
           "1 while a job runs: all of its workers came, and it has not failed."),
    Metric("ps_failed", "gauge", (), "", _hub_is(lambda report: bool(report["failure"])),
           "1 while the job, or the hub itself, cannot go on."),
    Metric("ps_draining", "gauge", (), "", _hub("draining"),
           "1 while all workers are asked to leave after their step."),
    Metric("ps_ends_with_job", "gauge", (), "", _hub("ends_with_job"),
           "1 where the hub ends when its job does: `--once`, or it was asked to stop."),
    Metric("ps_epoch", "gauge", (), "", _hub("epoch"),
           "Rises with every change of who takes part, from 1 on; 0 before the job begins."),
    Metric("ps_world_size", "gauge", (), "workers", _hub("world_size"),
           "Workers that the job wants; 0 while nobody has said."),
    Metric("ps_workers", "gauge", (), "workers", _count("workers"),
           "Workers that take part now."),
    Metric("ps_workers_left_total", "counter", ("how",), "workers", _total("workers"),
           "Workers that take part no more, by how they left: finished, preempted, failed or lost."),
    Metric("ps_jobs_total", "counter", ("result",), "jobs", _total("jobs"),
           "Jobs that are over, by result: finished, preempted or failed."),
    Metric("ps_steps_total", "counter", (), "steps", _steps,
           "Steps that all who take part have completed, those before a checkpoint that the job resumed"
           " included; left out before the first."),
    Metric("ps_lease_seconds", "gauge", (), "seconds", _hub("lease_seconds"),
           "Seconds for which a worker or a shard may be silent until it counts as lost."),
    Metric("ps_checkpoints_total", "counter", (), "checkpoints", _hub("checkpoints"),
           "Checkpoints that this hub wrote."),
    Metric("ps_checkpoint_age_seconds", "gauge", (), "seconds", _hub("checkpoint_age"),
           "Seconds since the last checkpoint, or since the hub was ready for the job that has none yet;"
           " left out unless a job runs whose parameters the hub saves."),
    Metric("ps_checkpoint_interval_seconds", "gauge", (), "seconds", _hub("checkpoint_every"),
           "Seconds from one checkpoint to the next, as asked for; left out without a directory for them."),
    # Its workers.
    Metric("ps_worker_steps_total", "counter", ("rank",), "steps", _worker_steps,
           "Steps that the worker has completed, counted as `ps_steps_total`."),
    Metric("ps_worker_steps_per_second", "gauge", ("rank",), "steps a second", _workers("steps_per_second"),
           "The worker's pace over its last few seconds."),
    Metric("ps_worker_loss", "gauge", ("rank",), "", _workers("loss"),
           "The loss that the script reported last; left out where that is none, or no finite number."),
    Metric("ps_worker_waiting_seconds", "gauge", ("rank",), "seconds", _workers("seconds_waiting"),
           "Seconds for which the worker has been held up by now; 0 while it computes."),
    Metric("ps_worker_heartbeat_age_seconds", "gauge", ("rank",), "seconds",
           _workers("seconds_since_heartbeat"),
           "Seconds since the worker was last heard; it beats each second, or faster under a short lease."),
    # Its shards.
    Metric("ps_shards", "gauge", (), "shards", _count("shards"),
           "Shards that are registered."),
    Metric("ps_shards_wanted", "gauge", (), "shards", _hub("shards_wanted"),
           "Shards that the job needs to begin; 0 around a ring."),
    Metric("ps_shard_up", "gauge", ("shard",), "", _shards_up,
           "1 if the shard told its numbers within a second; if not, they are left out."),
    Metric("ps_shard_heartbeat_age_seconds", "gauge", ("shard",), "seconds",
           _rows("shards", "shard", "seconds_since_heartbeat"),
           "Seconds since the shard was last heard."),
    Metric("ps_shard_pushes_total", "counter", ("shard",), "pushes", _shards("pushes"),
           "Gradients that counted, or will when their round closes."),
    Metric("ps_shard_duplicates_total", "counter", ("shard",), "pushes", _shards("duplicates"),
           "Pushes that were known already, and did not count again."),
    Metric("ps_shard_dropped_total", "counter", ("shard",), "pushes", _shards("dropped"),
           "Pushes that came too late for their round (`--mode backup`)."),
    Metric("ps_shard_received_bytes_total", "counter", ("shard",), "bytes", _shards("bytes_in"),
           "Payload that workers sent to the shard, headers left out."),
    Metric("ps_shard_sent_bytes_total", "counter", ("shard",), "bytes", _shards("bytes_out"),
           "Payload that the shard sent to workers."),
    Metric("ps_shard_queued_seconds_total", "counter", ("shard",), "seconds", _shards("queued_seconds"),
           "Seconds for which requests waited for others that had come with them."),
    Metric("ps_shard_handled_seconds_total", "counter", ("shard",), "seconds", _shards("handled_seconds"),
           "Seconds in which the shard read requests, updated and answered."),
    Metric("ps_shard_held_seconds_total", "counter", ("shard", "rank"), "seconds", _held,
           "Seconds for which answers to this worker were held back until the mode let them go; answers that"
           " were held at once add up."),
    Metric("ps_shard_cpu_seconds_total", "counter", ("shard",), "seconds", _shards("cpu_seconds"),
           "Seconds of cores that the shard's process used since it was started."),
    Metric("ps_shard_peak_bytes", "gauge", ("shard",), "bytes", _shards("peak_bytes"),
           "The most memory that the shard's process held at a time."),
    Metric("ps_shard_keys", "gauge", ("shard",), "keys", _shards("keys"),
           "Slices of the model that the shard holds; 0 for one that the job has no use for."),
    Metric("ps_shard_oldest_version", "gauge", ("shard",), "versions", _versions("oldest_version"),
           "Updates of the key that has had the fewest."),
    Metric("ps_shard_newest_version", "gauge", ("shard",), "versions", _versions("newest_version"),
           "Updates of the key that has had the most."),
    Metric("ps_push_staleness", "histogram", ("shard",), "versions", _shards("staleness"),
           "Versions by which the parameters moved on between a worker's read and the update by its push."),
)
# fmt: on


class _Collector:
    """What a registry asks for: every metric, with its readings."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield _family(metric, metric.read(self._report))


def _family(metric: Metric, readings: Iterable[Reading]) -> Family:
    if metric.type == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, counts in readings:
            histogram.add_metric(labels, *_buckets(counts))
        return histogram
    kind = _KINDS[metric.type]
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in readings:
        family.add_metric(labels, value)
    return family


def _buckets(counts: Mapping[str, int]) -> tuple[list[tuple[str, float]], float]:
    """How many values are at most each bound, and the sum of all."""
    values = {int(value): count for value, count in counts.items()}
    below = [
        (str(bound), float(sum(count for value, count in values.items() if value <= bound)))
        for bound in STALENESS_BUCKETS
    ]
    all_of_them = ("+Inf", float(sum(values.values())))
    return [*below, all_of_them], float(sum(value * count for value, count in values.items()))


_PAGE = """\
# Metrics

`ps-server start` serves these at `/metrics`, on the port of its status page, in Prometheus's text format.
This page is made from the table in `ps/observe/metrics.py`, by `python -m hubring.ps.observe.metrics`.

Counters of workers and shards are those of the job that runs and begin anew with the next one; `rate()` and
`increase()` allow for that. `ps_workers_left_total`, `ps_jobs_total` and `ps_checkpoints_total` count from
the hub's start. A number that nobody knows is left out. Around a ring no gradients pass the shards: what
they count stays 0.

| name | type | labels | unit | meaning |
| --- | --- | --- | --- | --- |
{rows}
"""


if __name__ == "__main__":
    print(document(), end="")
