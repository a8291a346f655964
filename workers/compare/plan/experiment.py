"""Experiments: what to compare, in which settings, and how often; with the metric and target of the job.

An `Experiment` is always consistent: its constructor rejects contradictions.
`hubring.workers.compare.plan.experiment_file` reads one from a file and from flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from hubring.ps.config.declaration import flag
from hubring.ps.config.values import Bytes, Count, Seconds, Whole
from hubring.ps.core.errors import UsageError
from hubring.workers.compare.plan.row import EVERY, ROWS, Row
from hubring.workers.compare.plan.setting import Fault, Link, Setting
from hubring.workers.peers.rows import chosen
from hubring.workers.runtime.slowdown import Straggler


class JobMetric(Struct, frozen=True):
    """A job's metric and target.

    Attributes:
        name: Name for `ps-worker --job`, or the name of a script.
        metric: Key of the metric in the job's record.
        title: The metric in words.
        target: Default target of the metric; None: no target.
        rising: Higher values are better.
        samples: Word for the job's samples.
        learning_rate: Default of the job; None: unknown.
    """

    name: str
    metric: str
    title: str
    target: float | None = None
    rising: bool = True
    samples: str = "samples"
    learning_rate: float | None = None

    def reached(self, value: float) -> bool:
        """Whether a value of the metric meets the target."""
        if self.target is None:
            return False
        return value >= self.target if self.rising else value <= self.target


JOBS = {
    job.name: job
    for job in (
        JobMetric("digits", "test_accuracy", "test accuracy", 0.93, True, "images", learning_rate=0.01),
        JobMetric("char-lm", "bits_per_char", "bits per character", 2.5, False, "lines", learning_rate=0.003),
    )
}


def find_job(name: str) -> JobMetric:
    """Returns the job with that name.

    Raises:
        UsageError: No job has that name.
    """
    if name not in JOBS:
        raise UsageError(f"--job: no job {name!r}; expected one of {', '.join(JOBS)}")
    return JOBS[name]


Positive = Annotated[float, Meta(gt=0, description="a number above 0")]
NotNegative = Annotated[float, Meta(ge=0, description="a number, at least 0")]
ParetoShape = Annotated[float, Meta(gt=1, description="a number above 1")]

ALL_ROWS = tuple(ROWS)


class LinkTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[link]`: the links of the hosts. Every rate is combined with every latency."""

    rate: tuple[Positive, ...] = ()
    """Bits a second each way; empty: unlimited."""
    latency: tuple[NotNegative, ...] = (0.0,)
    """Seconds from host to host."""
    jitter: NotNegative = 0.0
    """Seconds by which the latency varies, up and down."""
    workers_per_host: Count = 1
    """Workers that share a host and its link. The server and further shards have hosts of their own."""

    @property
    def links(self) -> Iterator[Link]:
        for rate, latency in product(self.rate or (None,), self.latency):
            yield Link(rate=rate, latency=latency, jitter=self.jitter, sharing=self.workers_per_host)


class StragglerTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[straggler]`: slow workers; see `hubring.workers.runtime.slowdown.Straggler`."""

    kind: Literal["constant", "pareto", "host"] = "constant"
    seconds: tuple[NotNegative, ...]
    """Extra seconds of a step, on average."""
    ranks: tuple[Whole, ...] = ()
    """Ranks of the slow workers; empty: all."""
    shape: ParetoShape = 2.5
    """Shape of the Pareto distribution."""
    baseline: bool = False
    """Also run everything without the straggler."""

    @property
    def stragglers(self) -> Iterator[Straggler | None]:
        yield from [None] * self.baseline
        for seconds in self.seconds:
            yield Straggler(kind=self.kind, seconds=seconds, ranks=self.ranks, shape=self.shape)


class FaultTable(Fault, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fault]`: the process to kill, and before which step."""

    baseline: bool = False
    """Also run everything without the fault."""

    @property
    def faults(self) -> Iterator[Fault | None]:
        yield from [None] * self.baseline
        yield Fault(victim=self.victim, rank=self.rank, step=self.step)


class ComputeTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[compute]`: compute time of a step on the emulated device. Workers sleep for the rest of it."""

    step: tuple[NotNegative, ...]
    """Seconds."""


class PricesTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[prices]`: prices of one host for an hour, all in one currency."""

    worker: NotNegative
    """A host with its workers."""
    server: NotNegative = 0.0
    """A host with one shard of a hub, or with its standby."""


FILLED = ("seed", "batch", "lr", "epochs")
"""Placeholders in a script's arguments."""

PLACEHOLDER = re.compile(r"(?<![{$]){([A-Za-z_]\w*)}")
"""A name in single braces. `${name}` and `{{name}}` belong to other programs; JSON does not match."""

_OF_SCRIPTS = {"metric": None, "title": None, "rising": True, "samples": "samples"}
_OF_SCRIPTS |= {"metric_regex": None, "samples_per_step": None}
"""Fields that only a script needs, with their defaults."""


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to compare.

    Raises:
        UsageError: Two values contradict each other.
    """

    name: str = "experiment"
    about: str = ""
    """What the experiment shows, in one sentence."""
    job: str | None = None
    """Built-in job: digits or char-lm. Set either this or `script`."""
    script: Path | None = None
    """Training script. It needs `metric`, the reported key to compare."""
    arguments: tuple[str, ...] = ()
    """Extra arguments of a job; all arguments of a script, with {seed}, {batch}, {lr}, {epochs} filled in."""
    metric: str | None = None
    """Key of the metric in the script's reports; None with `metric_regex`: the loss."""
    metric_regex: str | None = None
    """Finds the metric in what a script prints that does not call `hubring.report()`: the first group."""
    samples_per_step: Count | None = None
    """Samples of a step of all workers, for such a script; None: those that its model gets."""
    title: str | None = None
    """The metric in words."""
    rising: bool = True
    """Higher values of the metric are better; never of a loss."""
    samples: str = "samples"
    """Word for the samples, in plural."""
    target: float | None = None
    """Value of the metric to reach; None: the job's own."""
    rows: tuple[str, ...] = ALL_ROWS
    """Ways to train. The first synchronous row is the reference."""
    seeds: tuple[Whole, ...] = (0, 1, 2)
    """Each row runs once with each seed."""
    repeats: Count = 1
    """Runs with the same seed."""
    workers: tuple[Count, ...] = (2,)
    """Numbers of workers, which share the batch."""
    servers: tuple[Count, ...] = (1,)
    """Numbers of shard processes of the hub. With a link, each shard has its own host."""
    transport: Literal["auto", "shm", "zmq", "grpc", "zmq-tcp", "grpc-tcp"] = "auto"
    """Transport of the hub."""
    slice_bytes: Bytes | None = None
    """Largest slice of the hub's parameters; None: tuned by measuring."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Backend of `ddp`, `fsdp2` and `zero1`; `nccl` also of rings, and then all workers compute on GPUs."""
    batch: Count | None = None
    """Samples a step over all workers, the same in every row; None: the job's own."""
    lr: Literal["same", "linear", "per-worker"] = "same"
    """`linear`: multiplied by the workers, all rows. `per-worker`: divided by them, asynchronous rows."""
    learning_rate: Positive | None = None
    """Learning rate before `lr` scales it; None: the job's own."""
    epochs: Count | None = None
    """None: the job's own."""
    warmup: Whole | None = None
    """Steps to leave out of speeds; None: a tenth, at least five."""
    tolerance: Positive | None = None
    """Allowed difference of synchronous rows; None: that of `hubring.workers.compare.gate`."""
    timeout: Seconds = 600.0
    """Limit of one run in seconds."""
    threads: Count | None = None
    """PyTorch threads in every process of every row; None: cores / workers."""
    link: LinkTable | None = None
    straggler: StragglerTable | None = None
    fault: FaultTable | None = None
    compute: ComputeTable | None = None
    prices: PricesTable | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "seeds", "workers", "servers"):
            check_list(name, getattr(self, name))
        self._check_rows()
        self._check_script()
        if self.lr != "same" and self.yardstick.learning_rate is None:
            raise UsageError(f"lr = {self.lr} scales a learning rate, and none is known; set learning_rate")
        if self.link is not None and (self.transport == "shm" or "hub-shm" in self.rows):
            raise UsageError(
                f"{'row hub-shm' if 'hub-shm' in self.rows else 'transport = shm'} with [link]: shared memory"
                " does not use the link; use zmq or grpc, or remove [link]"
            )
        measures = self.fault is not None and self.fault.victim == "worker" and self.fault.rank == 0
        if self.fault is not None and (measures or self.fault.step < 2):
            raise UsageError(
                f"[fault] rank = {self.fault.rank}, step = {self.fault.step}: expected a rank from 1 (rank 0"
                " measures the model) and a step from 2 (the worker must complete two steps to be measured)"
            )
        _ = self.settings  # each `Setting` checks itself

    def _check_rows(self) -> None:
        for row in self.ways:
            if self.backend == "nccl" and (why := row.beside_nccl):
                raise UsageError(
                    f"row {row.name} does not run with backend = nccl: {why}; remove the row, or use gloo"
                )
            if row.unedited and self.script is None:
                raise UsageError(
                    f"row {row.name} trains scripts that make a torch.distributed group of their own; set"
                    " script (--script), or remove the row"
                )
            if row.peer is None and not row.unedited:
                continue
            if self.link is not None and not (row.peer is not None and row.peer.linked):
                raise UsageError(f"row {row.name} needs one machine; remove the row or the link")
            if self.fault is not None and self.fault.victim == "worker":
                raise UsageError(
                    f"row {row.name} does not survive a lost worker; remove the row"
                    " or the fault ([fault], --kill)"
                )

    def _check_script(self) -> None:
        if (self.job is None) == (self.script is None):
            raise UsageError("set either job, for a built-in job, or script, for your own script")
        if self.script is None:
            _ = self.yardstick  # fails on an unknown job
            for name, usual in _OF_SCRIPTS.items():
                if getattr(self, name) != usual:
                    raise UsageError(
                        f"{name} = {getattr(self, name)} requires script; the metric of job {self.job} is"
                        f" {self.yardstick.title}"
                    )
            return
        self._check_metric(self.script)
        named = PLACEHOLDER.findall(" ".join(self.arguments))
        values = {"batch": self.batch, "epochs": self.epochs, "lr": self.learning_rate}
        given = {name: value is not None for name, value in values.items()} | {"seed": len(self.seeds) > 1}
        for name in named:
            if name not in FILLED:
                raise UsageError(
                    f"unknown placeholder {{{name}}} in arguments; expected one of"
                    f" {', '.join(f'{{{each}}}' for each in FILLED)}"
                )
            if name != "seed" and not given[name]:
                key = "learning_rate" if name == "lr" else name
                raise UsageError(
                    f"{{{name}}} in arguments has no value; set {key} ({flag(key)}), or remove {{{name}}} so"
                    f" that {self.script.name} uses its own"
                )
        for name in FILLED:
            if given[name] and name not in named:
                raise UsageError(
                    f"{self.script.name} does not receive its {name}; add {{{name}}} to arguments"
                    + (", or use one seed and repeats" if name == "seed" else "")
                )

    def _check_metric(self, script: Path) -> None:
        if self.metric_regex is None and self.metric is None:
            raise UsageError(
                f"script = {script} needs metric: the key of hubring.report(...) that measures the quality of"
                " the model; or metric_regex (--metric-regex), which finds it in the script's output"
            )
        try:
            groups = re.compile(self.metric_regex or "()").groups
        except re.error as cause:
            raise UsageError(f"metric_regex = {self.metric_regex}: {cause}") from cause
        if not groups:
            raise UsageError(
                rf"metric_regex = {self.metric_regex} has no group; put the number into one: loss (\S+)"
            )
        others = [row.name for row in self.ways if not (row.unedited or row.name == "ddp")]
        if others and (self.metric_regex, self.samples_per_step) != (None, None):
            raise UsageError(
                f"row {others[0]} needs a script with lines of Hubring, and metric_regex and samples_per_step"
                " are for scripts without; set rows to ddp and ddp-hub (--rows ddp,ddp-hub)"
            )

    @property
    def yardstick(self) -> JobMetric:
        """The job with this experiment's target and learning rate."""
        if self.job is not None:
            job = find_job(self.job)
        else:
            assert self.script is not None
            metric = self.metric or "loss"
            rising = self.rising and "loss" not in metric
            title = self.title or metric.replace("_", " ")
            job = JobMetric(self.script.name, metric, title, None, rising, self.samples)
        return replace(
            job,
            target=job.target if self.target is None else self.target,
            learning_rate=self.learning_rate or job.learning_rate,
        )

    @property
    def ways(self) -> list[Row]:
        """The rows of this experiment."""
        return chosen(self.rows, EVERY)

    @property
    def settings(self) -> list[Setting]:
        """The grid: all combinations of the listed values."""
        return [
            Setting(workers=n, servers=k, link=link, straggler=straggler, fault=fault, compute=compute)
            for n, link, straggler, fault, compute, k in product(
                self.workers,
                [None] if self.link is None else self.link.links,
                [None] if self.straggler is None else self.straggler.stragglers,
                [None] if self.fault is None else self.fault.faults,
                [None] if self.compute is None else self.compute.step,
                self.servers,
            )
        ]

    def rate_for(self, row: Row, workers: int) -> float | None:
        """Returns the learning rate to pass to a row; None: the row uses the job's own."""
        own = self.yardstick.learning_rate
        if own is not None and self.lr == "linear":
            return own * workers
        if own is not None and self.lr == "per-worker" and not row.synchronous:
            return own / workers
        return self.learning_rate


def check_list(name: str, values: Sequence[object]) -> None:
    """Checks the values of a setting, or of an option.

    Raises:
        UsageError: There is none, or one occurs twice.
    """
    if not values:
        raise UsageError(f"{name} is empty; set at least one value")
    if len(set(values)) < len(values):
        raise UsageError(f"{name} = {', '.join(map(str, values))} has a duplicate; remove it")
