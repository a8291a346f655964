"""Recording changes nothing, and what is written is read, as far as it is complete."""

from __future__ import annotations

from contextlib import closing
from contextvars import copy_context
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from hubring.workers.audit.audit import AUTOCAST, Audit
from hubring.workers.audit.audit_file import AuditFile, AuditStep, ModelLayout, read_audit
from hubring.workers.audit.step_tap import BATCH_NORM, StepTap
from hubring.workers.audit.unmoved_elements import PERIOD
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.horovod import basics
from hubring.workers.horovod.gradients import ExchangeOptions, GradientExchange
from hubring.workers.launchers.placement import Placement
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
        assert len([one for one in entries if isinstance(one, AuditStep)]) == (8 if recorded else 0)
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


class SteppedByHub(torch.optim.SGD):
    """Its parameters can change before `step()`: as soon as the hub has the gradients of all ranks."""

    completed_steps, ahead, had_state = 0, 0, False
    answered = False
    wrapped: torch.optim.SGD

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        return {"weight": self.param_groups[0]["params"][0]}

    def answer(self) -> None:
        weight = self.named_parameters["weight"]
        weight.data.sub_(0.1 * weight.grad)  # type: ignore[operator]
        self.answered = True

    def step(self, closure: Any = None) -> Any:
        if not self.answered:
            self.answer()
        self.answered = False
        self.completed_steps += 1


def test_a_parameter_is_not_still_because_a_hub_answers_early_in_one_step_and_late_in_the_next() -> None:
    weight, entries = torch.nn.Parameter(torch.ones(4096)), list[Any]()
    hub = SteppedByHub([weight], lr=0.1)
    hub.wrapped = torch.optim.SGD([weight])
    communicator: Any = SimpleNamespace(rank=0, steps_on="server", lockstep=True, stepping_hub=None)
    tap = StepTap(0, hub, communicator, entries.append)
    for number in range(1, 10 * PERIOD):
        hub.zero_grad()
        (weight * 1.0).sum().backward()
        if number % PERIOD == 0:
            hub.answer()
        hub.step()
        tap.step_completed()
    assert not any(one.still for one in entries if isinstance(one, AuditStep))


def test_an_audit_leaves_out_an_optimizer_without_step_hooks(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit", LocalCommunicator())

    def exchange() -> GradientExchange:
        basics.begin(LocalCommunicator(), Placement(), thread=True)
        return GradientExchange(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), ExchangeOptions())

    audit.adopt(copy_context().run(exchange))
    audit.step_completed()
    audit.close()
    assert list(read_audit(tmp_path / "audit")) == []


def audited(audit: Audit, script: Script, communicator: Communicator) -> Training:
    """Returns the training of a script whose steps the audit records."""
    model = script.model()
    inner = script.optimizer(model)
    optimizer = DistributedOptimizer(
        inner, model, communicator=communicator, after_step=lambda _: audit.step_completed()
    )
    audit.adopt(optimizer)
    return Training(model, inner, optimizer, communicator)


def test_an_audit_counts_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.workers.audit.sample.perf_counter", count().__next__)
    communicator, script = LocalCommunicator(), Script()
    audit = Audit(tmp_path / "audit", communicator)
    training = audited(audit, script, communicator)
    for steps in (1, 2):
        script.take(training, *script.samples(steps))
        # A gradient of each parameter, the ends of backward and of the step, its begin, and the forward with
        # its backward and labels.
        assert audit.seconds == steps * (len(list(training.model.parameters())) + 7)
    audit.close()


def test_an_audit_notes_batch_norm_and_autocast(tmp_path: Path) -> None:
    communicator, script = LocalCommunicator(), Script(normalized)
    audit = Audit(tmp_path / "audit", communicator)
    in_bfloat16(audited(audit, script, communicator), *script.samples(1))
    audit.close()
    entries = list(read_audit(tmp_path / "audit"))
    facts = {fact for each in entries if isinstance(each, ModelLayout) for fact in each.facts}
    assert facts == {BATCH_NORM, AUTOCAST}


def layout() -> ModelLayout:
    return ModelLayout(
        trainer=0,
        rank=1,
        optimizer="SGD",
        steps_on="worker",
        names=["w"],
        dtypes=["float32"],
        counts=[2],
        groups=[0],
    )


def step(number: int) -> AuditStep:
    return AuditStep(
        0, number, [{"lr": 0.1}], 1.0, False, b"own", b"\1", b"", b"", b"\1", b"before", b"after"
    )


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    entries: list[ModelLayout | AuditStep] = [layout(), step(1), step(2)]
    with closing(AuditFile(tmp_path / "audit")) as file:
        for entry in entries:
            file.write(entry)
    assert list(read_audit(tmp_path / "audit")) == entries


def test_a_step_of_an_earlier_version_has_no_samples(tmp_path: Path) -> None:
    tag, *fields = msgspec.msgpack.decode(msgspec.msgpack.encode(step(1)))
    earlier = msgspec.msgpack.encode([tag, *fields[: AuditStep.__struct_fields__.index("samples")]])
    (tmp_path / "audit").write_bytes(len(earlier).to_bytes(4, "little") + earlier)
    (read,) = read_audit(tmp_path / "audit")
    assert isinstance(read, AuditStep)
    assert (read.samples, read.hashes, read.still) == (-1, b"", [])


def test_the_cut_off_end_of_a_killed_worker_is_left_out(tmp_path: Path) -> None:
    with closing(AuditFile(tmp_path / "audit")) as file:
        file.write(layout())
        file.write(step(1))
    whole = (tmp_path / "audit").read_bytes()
    for missing in (1, 20, len(whole) - 2):
        (tmp_path / "audit").write_bytes(whole[:-missing])
        assert step(1) not in list(read_audit(tmp_path / "audit"))
