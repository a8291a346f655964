"""Experiments: what is to be compared, under which circumstances, and how often.

An experiment that exists is consistent: contradictions are refused where it is made.
`hubring.workers.compare.experiment.experiment_file` reads one from a file and from flags.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from hubring.ps.config.kinds import Bytes, Count, Seconds, Whole
from hubring.ps.config.settings import flag
from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.job import Job, find
from hubring.workers.compare.experiment.row import ROWS, Row, select
from hubring.workers.compare.experiment.setting import Fault, Link, Setting
from hubring.workers.slowdown.straggler import Straggler

Positive = Annotated[float, Meta(gt=0, description="a number above 0")]
NotNegative = Annotated[float, Meta(ge=0, description="a number, at least 0")]
Shape = Annotated[float, Meta(gt=1, description="a number above 1")]

ALL_ROWS = tuple(ROWS)


class LinkTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[link]`: what joins the hosts; every value of a list is tried with every other."""

    rate: tuple[Positive, ...] = ()
    """Bits a second each way; none: as fast as the machine goes."""
    latency: tuple[NotNegative, ...] = (0.0,)
    """Seconds from host to host."""
    jitter: NotNegative = 0.0
    """Seconds by which that varies, up and down."""


class StragglerTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[straggler]`: who is slow; see `hubring.workers.compare.experiment.setting.Straggler`."""

    kind: Literal["constant", "pareto", "host"] = "constant"
    seconds: tuple[NotNegative, ...]
    """What a step takes longer, on average."""
    ranks: tuple[Whole, ...] = ()
    """Who; empty: all."""
    shape: Shape = 2.5
    """Of the Pareto distribution."""
    baseline: bool = False
    """Run everything without the straggler too."""


class FaultTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fault]`: who is killed, before which of its steps."""

    rank: Whole
    step: Whole
    baseline: bool = False
    """Run everything without the loss too."""


class ComputeTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[compute]`: how long a step computes on the emulated device; workers sleep for what is left of it."""

    step: tuple[NotNegative, ...]
    """Seconds."""


FILLED = ("seed", "batch", "lr", "epochs")
"""What a script's arguments may name in braces."""

PLACEHOLDER = re.compile(r"(?<![{$]){([A-Za-z_]\w*)}")
"""A name in single braces; `${name}` and `{{name}}` are for others to fill in, and JSON is no name."""

_OF_SCRIPTS = {"metric": None, "title": None, "rising": True, "samples": "samples"}
"""What only a script's author can tell, as it stands where nobody did."""


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to compare.

    Raises:
        UsageError: Two values contradict each other; says which and how to mend it.
    """

    name: str = "experiment"
    about: str = ""
    """What it is to show, in a sentence."""
    job: str | None = None
    """A job that ships: digits or char-lm. Either this or a script."""
    script: Path | None = None
    """A training script; what it reports is measured, so `metric` is needed."""
    arguments: tuple[str, ...] = ()
    """More for the job; all of them for a script, with {seed}, {batch}, {lr}, {epochs} filled in."""
    metric: str | None = None
    """Key of the measure among what the script reports."""
    title: str | None = None
    """The measure in words."""
    rising: bool = True
    """More of the measure is better."""
    samples: str = "samples"
    """What a sample is called."""
    target: float | None = None
    """Value of the measure to reach; none: the job's own."""
    rows: tuple[str, ...] = ALL_ROWS
    """Ways to train; the first synchronous one is measured against."""
    seeds: tuple[Whole, ...] = (0, 1, 2)
    """Everything is run once with each."""
    repeats: Count = 1
    """How often with the same seed."""
    workers: tuple[Count, ...] = (2,)
    """Processes that share the batch."""
    servers: tuple[Count, ...] = (1,)
    """Shard processes of the hub; with a link, each on a host of its own."""
    transport: Literal["auto", "shm", "zmq", "grpc"] = "auto"
    """To the hub."""
    slice_bytes: Bytes | None = None
    """Largest piece in which the hub's parameters travel; none: found out by trying."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Of the ring."""
    batch: Count | None = None
    """Samples a step, over all workers, the same in every row; none: the job's own."""
    lr: Literal["same", "linear", "per-worker"] = "same"
    """`linear`: times the workers, for all rows; `per-worker`: divided by them, for asynchronous rows."""
    learning_rate: Positive | None = None
    """Before that; none: the job's own."""
    epochs: Count | None = None
    """None: the job's own."""
    warmup: Whole | None = None
    """Steps that count for no speed; none: a tenth, at least five."""
    tolerance: Positive | None = None
    """How far synchronous rows may be apart; none: `hubring.workers.compare.judge.gate.TOLERANCE`."""
    timeout: Seconds = 600.0
    """Seconds that one run may take."""
    threads: Count | None = None
    """PyTorch's, in every process of every row; none: the cores by the workers."""
    link: LinkTable | None = None
    straggler: StragglerTable | None = None
    fault: FaultTable | None = None
    compute: ComputeTable | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "seeds", "workers", "servers"):
            _check_list(name, getattr(self, name))
        self._check_peers()
        self._check_script()
        if self.lr != "same" and self.yardstick.learning_rate is None:
            raise UsageError(f"lr = {self.lr} changes a learning rate that nobody named: give learning_rate")
        if self.link is not None and (self.transport == "shm" or "hub-shm" in self.rows):
            raise UsageError(
                f"{'row hub-shm' if 'hub-shm' in self.rows else 'transport = shm'} and [link]: shared memory"
                " knows no link; take zmq or grpc, or drop [link]"
            )
        if self.fault is not None and (self.fault.rank == 0 or self.fault.step < 2):
            raise UsageError(
                f"[fault] rank = {self.fault.rank}, step = {self.fault.step}: rank 0 measures the model, and"
                " whoever is lost should have taken two steps; name another rank, and a step from 2 on"
            )
        _ = self.settings  # each of which is checked where it is made

    def _check_peers(self) -> None:
        for row in self.ways:
            if row.peer is None:
                continue
            if self.link is not None and not row.peer.linked:
                raise UsageError(f"row {row.name} runs on one machine: leave it, or the link, out")
            if self.fault is not None:
                raise UsageError(
                    f"row {row.name} does not survive a lost worker: leave it out,"
                    " or the loss ([fault], --kill)"
                )

    def _check_script(self) -> None:
        if (self.job is None) == (self.script is None):
            raise UsageError("give either job, one that ships, or script, one of your own")
        if self.script is None:
            _ = self.yardstick  # an unknown job is told now, not once it is trained
            for name, usual in _OF_SCRIPTS.items():
                if getattr(self, name) != usual:
                    raise UsageError(
                        f"{name} = {getattr(self, name)} is for a script of your own; job {self.job} is"
                        f" measured by its {self.yardstick.title}"
                    )
            return
        if self.metric is None:
            raise UsageError(
                f"script = {self.script} needs metric: which of the keys that it gives to hubring.report(...)"
                " tells how good the model is"
            )
        named = PLACEHOLDER.findall(" ".join(self.arguments))
        self._check_placeholders(named, self.script)
        for name in FILLED:
            wanted = len(self.seeds) > 1 if name == "seed" else self._asked(name)
            if wanted and name not in named:
                raise UsageError(
                    f"{self.script.name} would not learn of its {name}: put {{{name}}} into arguments"
                    + (", or give one seed and repeats" if name == "seed" else "")
                )

    def _check_placeholders(self, named: list[str], script: Path) -> None:
        for name in named:
            if name not in FILLED:
                raise UsageError(
                    f"nothing fills in {{{name}}} of arguments; there are"
                    f" {', '.join(f'{{{each}}}' for each in FILLED)}"
                )
            if name != "seed" and not self._asked(name):
                key = "learning_rate" if name == "lr" else name
                raise UsageError(
                    f"{{{name}}} of arguments has no value: give {key} ({flag(key)}), or leave it out, and"
                    f" {script.name} takes its own"
                )

    def _asked(self, name: str) -> bool:
        given = {"batch": self.batch, "epochs": self.epochs, "lr": self.learning_rate}
        return given[name] is not None

    @property
    def yardstick(self) -> Job:
        """What is measured, and what is good enough."""
        if self.job is not None:
            job = find(self.job)
        else:
            assert self.script is not None
            assert self.metric is not None
            title = self.title or self.metric.replace("_", " ")
            job = Job(self.script.name, self.metric, title, None, self.rising, self.samples)
        return replace(
            job,
            target=job.target if self.target is None else self.target,
            learning_rate=self.learning_rate or job.learning_rate,
        )

    @property
    def ways(self) -> list[Row]:
        """The rows."""
        return select(self.rows)

    @property
    def settings(self) -> list[Setting]:
        """The grid: every value of every list with every other."""
        return [
            Setting(workers=n, servers=k, link=link, straggler=straggler, fault=fault, compute=compute)
            for n, link, straggler, fault, compute, k in product(
                self.workers,
                self._links(),
                self._stragglers(),
                self._faults(),
                self._computes(),
                self.servers,
            )
        ]

    def _links(self) -> list[Link | None]:
        if self.link is None:
            return [None]
        rates, jitter = self.link.rate or (None,), self.link.jitter
        return [
            Link(rate=rate, latency=latency, jitter=jitter)
            for rate, latency in product(rates, self.link.latency)
        ]

    def _stragglers(self) -> list[Straggler | None]:
        table = self.straggler
        if table is None:
            return [None]
        slow = [
            Straggler(kind=table.kind, seconds=seconds, ranks=table.ranks, shape=table.shape)
            for seconds in table.seconds
        ]
        return [None, *slow] if table.baseline else [*slow]

    def _faults(self) -> list[Fault | None]:
        if self.fault is None:
            return [None]
        fault = Fault(rank=self.fault.rank, step=self.fault.step)
        return [None, fault] if self.fault.baseline else [fault]

    def _computes(self) -> list[float | None]:
        return [None] if self.compute is None else list(self.compute.step)

    def rate_for(self, row: Row, workers: int) -> float | None:
        """The learning rate that a row is told; None: it takes the job's own."""
        own = self.yardstick.learning_rate
        if own is not None and self.lr == "linear":
            return own * workers
        if own is not None and self.lr == "per-worker" and not row.synchronous:
            return own / workers
        return self.learning_rate


def _check_list(name: str, values: tuple[object, ...]) -> None:
    if not values:
        raise UsageError(f"{name} is empty: give at least one")
    if len(set(values)) < len(values):
        raise UsageError(f"{name} = {', '.join(map(str, values))} names one twice")
