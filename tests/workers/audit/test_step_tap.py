"""Recording changes nothing."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hubring.workers.audit.audit import AUTOCAST, Audit
from hubring.workers.audit.audit_file import ModelLayout, read
from hubring.workers.audit.step_tap import BATCH_NORM, StepTap
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.horovod.optimizer.trainer import Trainer
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.compare.audited import KINDS, Script, Training
from tests.support.compare.correct_scripts import SCRIPTS, in_bfloat16, normalized


@pytest.mark.slow
@pytest.mark.parametrize("row", ["local", "ring", "hub-bsp", "hub-aggregate"])
@pytest.mark.parametrize("name", ["momentum", "clipped, adam", "scaled", "across the barrier"])
def test_training_is_the_same_bit_by_bit(row: str, name: str) -> None:
    script = SCRIPTS[name]

    def train(recorded: bool, communicator: Communicator) -> list[torch.Tensor]:
        model, taps = script.build(), list[StepTap]()
        inner = script.optimizer(model)

        def completed(_: int) -> None:
            for tap in taps:
                tap.step_completed()

        optimizer = DistributedOptimizer(
            inner,
            model,
            communicator=communicator,
            after_step=completed,
            **{"bucket_bytes": 128, **script.options},
        )
        entries: list[Any] = []
        if recorded:
            taps.append(StepTap(0, optimizer, communicator, entries.append))
        training = Training(model, inner, optimizer, communicator)
        for training.number in range(1, 9):
            rank, size = communicator.rank, communicator.size
            script.take(training, *(each[rank::size] for each in script.samples(training.number)))
        optimizer.settle()
        assert len(entries) == (9 if recorded else 0)
        return [parameter.detach().clone() for parameter in model.parameters()]

    found = []
    for recorded in (False, True):
        ranks = KINDS[row]()
        try:
            found.append(ranks.run(partial(train, recorded)))
        finally:
            ranks.close()
    for plain, watched in zip(*found, strict=True):
        assert all(map(torch.equal, plain, watched))


def test_an_audit_leaves_out_an_optimizer_without_step_hooks(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit", LocalCommunicator())
    audit.adopt(Trainer({}, lambda: 0.0, list))
    audit.step_completed()
    audit.close()
    assert list(read(tmp_path / "audit")) == []


def test_an_audit_counts_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.workers.audit.cost.perf_counter", count().__next__)
    audit, communicator, script = (
        Audit(tmp_path / "audit", LocalCommunicator()),
        LocalCommunicator(),
        Script(),
    )
    model = script.model()
    inner = script.optimizer(model)
    optimizer = DistributedOptimizer(
        inner, model, communicator=communicator, after_step=lambda _: audit.step_completed()
    )
    audit.adopt(optimizer)
    training = Training(model, inner, optimizer, communicator)
    for steps in (1, 2):
        script.take(training, *script.samples(steps))
        # A gradient of each parameter, and the ends of backward and of the step, and its begin.
        assert audit.seconds == steps * (len(list(model.parameters())) + 4)
    audit.close()


def test_an_audit_notes_batch_norm_and_autocast(tmp_path: Path) -> None:
    communicator = LocalCommunicator()
    audit = Audit(tmp_path / "audit", communicator)
    script = Script(normalized, take=in_bfloat16)
    model = script.model()
    inner = script.optimizer(model)
    optimizer = DistributedOptimizer(
        inner, model, communicator=communicator, after_step=lambda _: audit.step_completed()
    )
    audit.adopt(optimizer)
    in_bfloat16(Training(model, inner, optimizer, communicator), *script.samples(1))
    audit.close()
    entries = list(read(tmp_path / "audit"))
    facts = {fact for each in entries if isinstance(each, ModelLayout) for fact in each.facts}
    assert facts == {BATCH_NORM, AUTOCAST}
