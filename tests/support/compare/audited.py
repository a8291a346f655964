"""Training with recorded steps in this process: real optimizers, shards and rings, with ranks on threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from hubring.ps.store.consistency import ASP, SSP, Consistency
from hubring.workers.audit.audit_file import AuditFile, AuditStep, ModelLayout
from hubring.workers.audit.step_tap import StepTap
from hubring.workers.communicators.base import Communicator
from hubring.workers.compare.gate.recorded_steps import Recording, recorded
from hubring.workers.compare.gate.same_parameters import STEP_TOLERANCE
from hubring.workers.compare.gate.step_checks import RunCheck, Single, check_run
from hubring.workers.compare.plan.row import ROWS
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.run.outcome import EARLY, Line, audit_file, read_record
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.ranks import AggregatingRanks, HubRanks, LocalRanks, Ranks, RingRanks, Seat

SIZE = 2
"""Ranks of every row but `local`."""

FEATURES, CLASSES = 6, 4

HERE = threading.local()
"""`HERE.rank` is the rank of the thread, for faults of one rank."""


class _Ring(RingRanks):
    size = SIZE


class _Hub(HubRanks):
    size = SIZE
    slice_bytes = 64


class _Aggregating(AggregatingRanks):
    size = SIZE
    slice_bytes = 64


class _Asynchronous(_Hub):
    mode = "asp"

    def consistency(self) -> Consistency:
        return ASP()

    def join(self, rank: int) -> Communicator:
        seat = Seat(self, rank)
        seat.lockstep, seat.mode = False, self.mode
        return self.seated(seat)


class _Stale(_Asynchronous):
    mode = "ssp"

    def consistency(self) -> Consistency:
        return SSP(ROWS["hub-ssp"].staleness)


KINDS: dict[str, type[Ranks]] = {
    "local": LocalRanks,
    "ring": _Ring,
    "hub-bsp": _Hub,
    "hub-aggregate": _Aggregating,
    "hub-asp": _Asynchronous,
    "hub-ssp": _Stale,
}
"""The ranks of each row."""


_BUILDING = threading.Lock()


def small() -> nn.Sequential:
    """Returns two linear layers, with the same parameters in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Returns SGD with momentum."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


@dataclass
class Training:
    """One rank's training.

    Attributes:
        number: The step that is taken, from 1.
    """

    model: nn.Module
    inner: torch.optim.Optimizer
    optimizer: DistributedOptimizer
    communicator: Communicator
    number: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    """What a script keeps between steps."""

    @property
    def layers(self) -> nn.Sequential:
        """The model of a script whose model is sequential."""
        assert isinstance(self.model, nn.Sequential)
        return self.model

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of this rank's samples."""
        return functional.cross_entropy(self.model(inputs), labels)


Take = Callable[[Training, Tensor, Tensor], None]
"""Takes one step with this rank's samples."""


def nothing(_: Training) -> None:
    """Does nothing between two steps, or before the optimizer's."""


def taking(
    loss: Callable[[Training, Tensor, Tensor], Tensor] = Training.loss,
    after: Callable[[Training], object] = nothing,
) -> Take:
    """Returns a step of this loss; `after` runs between backward and the optimizer's step."""

    def take(training: Training, inputs: Tensor, labels: Tensor) -> None:
        training.optimizer.zero_grad()
        loss(training, inputs, labels).backward()
        after(training)
        training.optimizer.step()

    return take


plain = taking()
"""Takes a step as most scripts do."""


def deal(inputs: Tensor, rank: int, size: int) -> Tensor:
    """Returns a rank's samples of a batch; the first ranks have one more if it does not divide evenly."""
    return inputs[rank::size]


class Script(Struct, frozen=True):
    """A training script.

    Attributes:
        model: Makes the model.
        optimizer: Makes torch's optimizer.
        take: Takes one step.
        before: Runs before each step.
        options: Of DistributedOptimizer.
        steps: Number of steps.
        batch: Samples of a step, of all ranks.
        last: Samples of every fifth step, as at the end of an epoch.
        deal: Returns a rank's samples.
        shape: Of one sample.
        ends: Runs after the last step.
    """

    model: Callable[[], nn.Module] = small
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    take: Take = plain
    before: Callable[[Training], None] = nothing
    options: dict[str, Any] = {}
    steps: int = 12
    batch: int = 12
    last: int = 12
    deal: Callable[[Tensor, int, int], Tensor] = deal
    shape: tuple[int, ...] = (FEATURES,)
    ends: Callable[[Training], None] = nothing
    loads: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]] | None = None
    """Yields the batches of a rank of so many; None: `samples`, dealt out."""

    def batches(self, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields a rank's batches."""
        if self.loads is not None:
            yield from self.loads(rank, size)
            return
        for step in range(1, self.steps + 1):
            inputs, labels = self.samples(step)
            yield self.deal(inputs, rank, size), self.deal(labels, rank, size)

    def build(self) -> nn.Module:
        """Returns the model, on one thread at a time: threads share the random numbers of its parameters."""
        with _BUILDING:
            return self.model()

    def samples(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns the whole batch of a step."""
        count = self.batch if step % 5 else self.last
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(count, *self.shape, generator=generator)
        return inputs, torch.randint(0, CLASSES, (count,), generator=generator)


class Trained(Struct, frozen=True):
    """What one row recorded, and rank 0's parameters by the names of their files."""

    row: str
    entries: list[Sequence[ModelLayout | AuditStep]]
    records: list[list[Line]]
    saved: dict[str, dict[str, Tensor]]

    @property
    def ranks(self) -> list[Recording]:
        """Every rank's recording."""
        return [recorded(entries) for entries in self.entries]

    def without_samples(self) -> Trained:
        """Returns what an earlier version would have recorded."""
        known = [
            [replace(one, samples=-1, hashes=b"") if isinstance(one, AuditStep) else one for one in entries]
            for entries in self.entries
        ]
        return replace(self, entries=known)

    def save(self, folder: Path) -> None:
        """Writes the recorded steps, and the ranks' samples into the records, to the folder of a run."""
        for rank, (entries, lines) in enumerate(zip(self.entries, self.records, strict=True)):
            with closing(AuditFile(audit_file(folder, rank))) as file:
                for entry in entries:
                    file.write(entry)
            path, samples = folder / f"record {rank}.jsonl", {line["step"]: line["samples"] for line in lines}
            known = [dict(line) for line in read_record(path)]
            for line in known:
                if "samples" in line:
                    line["samples"] = samples.get(line["step"], line["samples"])
            path.write_text("".join(f"{json.dumps(line)}\n" for line in known))

    def check(self, alone: Trained | None = None) -> RunCheck:
        """Returns what the gate finds, with a single process to compare with, if any."""
        run = PlannedRun(Setting(workers=SIZE), ROWS[self.row], seed=0)
        single = self if self.row == "local" else alone
        known = None if single is None else Single.of(single.ranks[0], STEP_TOLERANCE)
        return check_run(run, self.ranks, STEP_TOLERANCE, known)


def train(row: str, script: Script) -> Trained:
    """Trains all ranks of a row."""
    ranks = KINDS[row]()
    try:
        found = ranks.run(partial(_train, script))
    finally:
        ranks.close()
    entries, records, saved = zip(*found, strict=True)
    return Trained(row, list(entries), list(records), saved[0])


def _train(
    script: Script, communicator: Communicator
) -> tuple[Sequence[ModelLayout | AuditStep], list[Line], dict[str, dict[str, Tensor]]]:
    HERE.rank = communicator.rank
    entries: list[ModelLayout | AuditStep] = []
    taps: list[StepTap] = []
    model = script.build()
    inner = script.optimizer(model)
    optimizer = DistributedOptimizer(
        inner,
        model,
        communicator=communicator,
        after_step=lambda _: taps[0].step_completed(),
        **{"bucket_bytes": 128, **script.options},
    )
    taps.append(StepTap(0, optimizer, communicator, entries.append))
    training, lines = Training(model, inner, optimizer, communicator), list[Line]()
    saved = dict[str, dict[str, Tensor]]()

    def save(name: str) -> None:
        optimizer.settle()
        saved[name] = {name: each.detach().clone() for name, each in model.named_parameters()}

    for step, (inputs, labels) in enumerate(script.batches(communicator.rank, communicator.size), 1):
        training.number = step
        script.before(training)
        if len(inputs):
            script.take(training, inputs, labels)
            lines.append({"step": optimizer.completed_steps, "samples": len(inputs)})
        if optimizer.completed_steps == EARLY:
            save(f"parameters step{EARLY}")
    script.ends(training)
    save("parameters")
    taps[0].close()
    return entries, lines, saved
