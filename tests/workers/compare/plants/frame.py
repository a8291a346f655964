"""How a plant is declared and what the comparison says of it.

A plant changes one thing in otherwise equal rows: the script of a row, the code while a row trains, or what
a run left in its folder. Rows without a change are trained once for all plants. Ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hubring.workers.compare.findings import Findings
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import RunOutcome
from hubring.workers.runtime.sampler import ShardedSampler
from tests.support.compare.audited import CLASSES, FEATURES, Script, Trained, train
from tests.support.compare.replayed import Replayed, findings

ROWS = ("local", "ring", "hub-bsp")
EPOCHS = 8
IMAGES = 40
"""Samples of the data set."""
BATCH = 12
"""Samples of a step, of all ranks. Each epoch has three steps and leaves four samples out."""


@cache
def dataset(seed: int = 0) -> TensorDataset:
    """Returns the training data, or with another seed other data of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(IMAGES, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (IMAGES,), generator=generator))


def loaded(
    rank: int,
    size: int,
    *,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    drop_last: bool = True,
    shuffle: bool = True,
    seed: int = 0,
    sets_epoch: bool = True,
    shard: int | None = None,
    data: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields a rank's batches as the README's script loads them."""
    source = dataset(data)
    sampler = ShardedSampler(source, shuffle, seed, rank if shard is None else shard, size)
    loader = DataLoader(source, batch // size, sampler=sampler, drop_last=drop_last)
    for epoch in range(epochs):
        if sets_epoch:
            sampler.set_epoch(epoch)
        yield from loader


PLAIN = Script(loads=loaded)
"""The script of rows without a change."""


@dataclass(frozen=True)
class Plant:
    """One fault, or a clean control.

    Attributes:
        says: What the report must contain, in parts; none: a control, which must not withhold or fail a row.
        scripts: The scripts of rows that have another one than `script`.
        script: The script of all other rows.
        rows: The rows of the experiment.
        plant: Returns the context in which the rows in `within` train.
        within: These rows.
        spoils: Changes what a run left; it gets the run and its folder.
        replays: Fields of the `Replayed` runner, as `records`, `results` or `parameters`.
        asked: Changes of the experiment.
    """

    says: tuple[str, ...] = ()
    scripts: Mapping[str, Script] = field(default_factory=dict)
    script: Script = PLAIN
    rows: tuple[str, ...] = ROWS
    plant: Callable[[], Any] = nullcontext
    within: tuple[str, ...] = ()
    spoils: Callable[[PlannedRun, Path], None] = lambda run, folder: None
    replays: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)

    def trained(self, row: str) -> Trained:
        """Returns the training of a row."""
        script = self.scripts.get(row, self.script)
        if row not in self.within:
            return _known(row, script)
        with self.plant():
            return train(row, script)

    def findings(self, folder: Path) -> Findings:
        """Returns what the comparison finds, in a folder of its own."""
        trained = {row: self.trained(row) for row in self.rows}
        runner = _Planted(trained=trained, spoils=self.spoils, **self.replays)
        return findings(folder, runner, **{"rows": self.rows, "seeds": (0,), **self.asked})


_trained: list[tuple[str, Script, Trained]] = []


def _known(row: str, script: Script) -> Trained:
    """Returns a row's training without a fault, which is made once. Scripts hold dicts: they have no hash."""
    for name, other, trained in _trained:
        if name == row and other == script:
            return trained
    _trained.append((row, script, train(row, script)))
    return _trained[-1][2]


@dataclass
class _Planted(Replayed):
    trained: dict[str, Trained] = field(default_factory=dict)
    spoils: Callable[[PlannedRun, Path], None] = lambda run, folder: None

    def run(self, run: PlannedRun, folder: Path, progress: Any) -> RunOutcome:
        left = Replayed.run(self, run, folder, progress)
        trained = self.trained[run.row.name]
        trained.save(folder)
        for name, tensors in trained.saved.items():
            save_file(tensors, folder / f"{name}.safetensors")
        self.spoils(run, folder)
        return left


def alarms(found: Findings) -> list[str]:
    """Returns why rows have no speed or no result, in the report's words."""
    return [why for row in found.rows for why in (row.withheld, row.failed) if why]
