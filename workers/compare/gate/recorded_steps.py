"""The recorded steps of one worker, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import DecodeError, Struct
from msgspec.structs import replace
from torch import Tensor

from hubring.ps.core.errors import HubringError
from hubring.workers.audit import audit_file
from hubring.workers.audit.audit_file import AuditStep, ModelLayout


class RecordedStep(Struct, frozen=True):
    """One step of one rank. Tensors are flat, with every recorded element, in the dtype of the record.

    All steps of all ranks are held at once. Their elements stay in the files, of which the kernel reads what
    is used, and `exact` makes the float64 of one step only while it is judged.

    Attributes:
        layout: The parameters.
        parameter_of: The parameter of each element, by its place in the layout.
        step: Completed steps, with this one.
        options: The options of each parameter group.
        divisor: By which `step()` divides what is given.
        script_inside: Whether the script ran code inside `step()`.
        waits: Whether `step()` waits for the exchange.
        own: This rank's gradient, as autograd made it; zeros where there is none.
        owns: Whether each parameter has one, by element.
        arrived: The gradient when backward had returned; None: not known.
        given: The gradient that stepped or was pushed; None: not known.
        gives: Whether each parameter has one, by element.
        before: The parameters before the step.
        after: The parameters after it; None: not known.
        pushes: Of each push to an asynchronous hub: key, position in the order of pushes, version of the
            answer.
        written: Whether something changed the parameters between the last step and this one.
        held: Whether this rank holds each element; of others only `own` is its own record.
        samples: A hash of each sample that the rank trained on: int64; None: not recorded.
        epoch: Where they come from: see `AuditStep`.
        still: Elements that steps do not change: see `AuditStep`.
        moved: Whether something changed other elements of the parameters between the last step and this one.
        state: The optimizer's state of each element before the step, by its name; NaN: none.
        weight: What this rank's gradients count in the mean.
    """

    layout: ModelLayout
    parameter_of: Tensor
    step: int
    options: list[dict[str, Any]]
    divisor: float
    script_inside: bool
    waits: bool
    own: Tensor
    owns: Tensor
    arrived: Tensor | None
    given: Tensor | None
    gives: Tensor
    before: Tensor
    after: Tensor | None
    pushes: list[tuple[int, int, int]]
    written: bool
    held: Tensor
    samples: Tensor | None
    epoch: tuple[int, ...]
    still: list[tuple[int, int]]
    moved: bool = False
    state: dict[str, Tensor] = {}
    weight: float = 1.0

    def with_parameters_of(self, later: RecordedStep) -> RecordedStep:
        """Returns this step as if the optimizer had had the parameters that it has in a later one."""
        missing = len(later.own) - len(self.own)
        if not missing:
            return self

        def longer(values: Tensor) -> Tensor:
            return torch.cat([values, values.new_zeros(missing)])

        groups = [*self.layout.groups, *[-1] * (len(later.layout.names) - len(self.layout.names))]
        return replace(
            self,
            layout=msgspec.structs.replace(later.layout, groups=groups),
            parameter_of=later.parameter_of,
            held=later.held,
            **self._each(longer, "own", "owns", "arrived", "given", "gives", "before", "after"),
        )

    def exact(self) -> RecordedStep:
        """Returns this step in float64, with the gradients that stepped."""
        exact = self._each(Tensor.double, "own", "arrived", "given", "before", "after")
        if exact["given"] is not None:
            exact["given"] = exact["given"] / self.divisor
        return replace(self, divisor=1.0, **exact)

    def _each(self, change: Callable[[Tensor], Tensor], *names: str) -> dict[str, Any]:
        """Returns these tensors, changed; None where there is none."""
        found = {name: getattr(self, name) for name in names}
        return {name: None if each is None else change(each) for name, each in found.items()}


def mean_of(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Returns the mean of the ranks' rows by their weights; without weights all count equally."""
    if len(set(weights)) < 2:
        return rows.mean(0)
    shares = torch.tensor(weights, dtype=rows.dtype)
    return (shares / shares.sum()) @ rows


StepsOfOptimizers = Mapping[int, Sequence[RecordedStep]]
"""A rank's steps in order, by the number of their optimizer."""


def by_optimizer(ranks: Sequence[StepsOfOptimizers]) -> list[list[Sequence[RecordedStep]]]:
    """Returns the steps of every rank, in rank order, for one optimizer after another."""
    trainers = sorted(set().union(*ranks))
    return [[rank.get(trainer, ()) for rank in ranks] for trainer in trainers]


class Recording(NamedTuple):
    """The file of one worker.

    Attributes:
        trainers: The steps in order, by the number of their optimizer.
        facts: What makes a rank's gradients differ, by right, from those of the whole batch.
        others: Steps of other elements, each of which stands for itself
            (`hubring.workers.audit.rotating_elements`).
    """

    trainers: dict[int, list[RecordedStep]]
    facts: frozenset[str]
    others: Sequence[RecordedStep] = ()


def read(path: Path) -> Recording:
    """Reads the file of one worker.

    Raises:
        HubringError: The file is damaged.
    """
    try:
        return recorded(audit_file.read_audit(path))
    except (DecodeError, OSError, ValueError) as cause:
        raise HubringError(
            f"{path} is damaged ({cause}); delete the run's folder to repeat the run"
        ) from cause


def recorded(entries: Iterable[ModelLayout | AuditStep]) -> Recording:
    """Returns what these entries record."""
    facts: set[str] = set()
    found: dict[int, list[RecordedStep]] = {}
    layouts: dict[int, _Layout] = {}
    options: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        if isinstance(entry, ModelLayout):
            elements = torch.repeat_interleave(torch.arange(len(entry.counts)), torch.tensor(entry.counts))
            held = _bools(entry.held) if entry.held else torch.ones(len(elements), dtype=torch.bool)
            layouts[entry.trainer] = _Layout(entry, elements, held, {})
            facts.update(entry.facts)
            found.setdefault(entry.trainer, [])
            continue
        if entry.groups is not None:
            options[entry.trainer] = entry.groups
        steps = found[entry.trainer]
        last = steps[-1] if steps else None
        steps.append(_step(layouts[entry.trainer], entry, options[entry.trainer], last))
    trainers = {trainer: list(_completed(steps)) for trainer, steps in found.items() if trainer >= 0}
    others = [one for trainer, steps in found.items() if trainer < 0 for one in steps]
    return Recording(trainers, frozenset(facts), others)


class _Layout(NamedTuple):
    """A layout with what follows from it, which its steps share.

    Attributes:
        masks: A bool per element, by one byte per parameter.
    """

    layout: ModelLayout
    parameter_of: Tensor
    held: Tensor
    masks: dict[bytes, Tensor]

    def mask(self, content: bytes) -> Tensor:
        """Returns one bool per element, from one byte per parameter; False where nothing is known."""
        key = bytes(content)
        if key not in self.masks:
            known = _bools(content) if content else torch.zeros(len(self.layout.counts), dtype=torch.bool)
            self.masks[key] = known[self.parameter_of]
        return self.masks[key]


def _step(
    known: _Layout, entry: AuditStep, options: list[dict[str, Any]], last: RecordedStep | None
) -> RecordedStep:
    layout, parameter_of, held, _ = known
    dtype = torch.float64 if layout.wide else torch.float32
    own, owns = _tensor(entry.own, dtype), known.mask(entry.owns)
    own = own if bool(owns.all()) else torch.where(owns, own, 0)
    arrived = _tensor(entry.arrived, dtype) if entry.arrived else None
    gives = known.mask(entry.gives)
    given = (_tensor(entry.given, dtype) if entry.given else arrived) if entry.gives else None
    after = _tensor(entry.after, dtype) if entry.after else None
    before = _tensor(entry.before, dtype) if entry.before else None if last is None else last.after
    written = bool(entry.before) and last is not None and last.after is not None
    return RecordedStep(
        layout=layout,
        parameter_of=parameter_of,
        step=entry.step,
        options=options,
        divisor=entry.divisor,
        script_inside=entry.script_inside,
        waits=bool(entry.after),
        own=own,
        owns=owns,
        arrived=arrived,
        given=None if given is None else given if bool(gives.all()) else torch.where(gives, given, 0),
        gives=gives,
        before=torch.full_like(own, torch.nan) if before is None else before,
        after=after,
        pushes=entry.pushes,
        written=written,
        held=held,
        samples=None if entry.samples < 0 else _tensor(entry.hashes, torch.int64),
        epoch=tuple(entry.epoch),
        still=entry.still,
        moved=entry.moved,
        state={name: _tensor(values, dtype) for name, values in entry.state.items()},
        weight=entry.weight,
    )


def joined(ranks: Sequence[Recording]) -> list[Recording]:
    """Returns the recordings, in which each rank has what the others hold of sharded parameters."""
    if all(bool(one.held.all()) for rank in ranks for steps in rank.trainers.values() for one in steps):
        return list(ranks)
    found = [
        Recording({trainer: list(steps) for trainer, steps in rank.trainers.items()}, rank.facts)
        for rank in ranks
    ]
    for trainer in ranks[0].trainers:
        for number, steps in enumerate(zip(*(rank.trainers[trainer] for rank in ranks), strict=False)):
            for rank, step in zip(found, _whole(steps), strict=True):
                rank.trainers[trainer][number] = step
    return found


def _whole(steps: Sequence[RecordedStep]) -> Iterator[RecordedStep]:
    """Yields the same step of all ranks, in which each element is as the rank that holds it recorded it."""

    def whole(parts: Sequence[Tensor | None]) -> Tensor | None:
        known = [part for part in parts if part is not None]
        if len(known) < len(steps):
            return None
        held = [torch.where(step.held, part, 0) for step, part in zip(steps, known, strict=True)]
        return torch.stack(held).sum(0)

    before = whole([step.before for step in steps])
    assert before is not None
    arrived, given = whole([step.arrived for step in steps]), whole([step.given for step in steps])
    after = whole([step.after for step in steps])
    for step in steps:
        yield replace(step, arrived=arrived, given=given, before=before, after=after)


def _completed(steps: list[RecordedStep]) -> Iterator[RecordedStep]:
    """Yields the steps, with the next step's parameters for those that are only known then."""
    for number, step in enumerate(steps):
        later = steps[number + 1] if number + 1 < len(steps) else None
        known = step.after is not None or later is None or later.before.shape != step.before.shape
        yield step if known else replace(step, after=later.before if later else None)


def _tensor(content: bytes, dtype: torch.dtype) -> Tensor:
    # Torch wants writable memory: bytes are copied, and what was read from a file is used as it is.
    writable = bytearray(content) if isinstance(content, bytes) else content
    return torch.frombuffer(writable, dtype=dtype) if content else torch.zeros(0, dtype=dtype)


def _bools(content: bytes) -> Tensor:
    """Returns a bool for each byte."""
    return _tensor(content, torch.uint8).bool()
