"""Bandwidth of a training's exchanges, in the columns of nccl-tests.

- size, count, type: of the trained model; a step exchanges all of it once.
- redop: `avg` if a step takes the mean gradient, `none` if every gradient is applied separately.
- time: exposed_ms + hidden_ms (`hubring.workers.compare.judge.measure`): how long a step had an exchange in
  progress. Both cover the same steady steps; mean over these and workers, median over seeds. The time
  includes the wait for slower workers, and the optimizer step if the server steps but not if workers step.
- algbw, busbw: `hubring.workers.compare.result.nccl_tests`, which also defines busbw for a hub.
- wrong: parameter elements that differ from the first synchronous row by more than the gate's tolerance, over
  all seeds; None if nothing was compared with that row. nccl-tests checks each result separately; here the
  parameters show the errors of all earlier exchanges.

A row has no line if the time is unknown, nothing was exchanged, or a worker was lost, because the number of
ranks then changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from safetensors.torch import load_file

from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import counted
from hubring.workers.compare.judge.gate import Judgement
from hubring.workers.compare.result.findings import Bandwidth, Entry
from hubring.workers.compare.result.nccl_tests import algbw, busbw
from hubring.workers.compare.run.outcome import Outcome

_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
}
"""Names of types in nccl-tests."""


@dataclass(frozen=True, slots=True)
class _Model:
    size: int
    count: int
    type: str


def bandwidth(
    experiment: Experiment, outcomes: Mapping[str, Outcome], judged: Judgement, entries: Iterable[Entry]
) -> list[Bandwidth]:
    """Returns one line for every row of every setting that has one.

    Args:
        experiment: The experiment.
        outcomes: By label.
        judged: Result of the gate.
        entries: The rows' numbers, in the order of `summarise`.
    """
    model, found = _model(outcomes.values()), []
    for (setting, row), entry in zip(product(experiment.settings, experiment.ways), entries, strict=True):
        if model is None or setting.fault is not None or not _exchanged(entry):
            continue
        runs = [run for seed in entry.seeds for run in counted(experiment, setting, row, seed)]
        wrong = judged.wrong({run.label for run in runs})
        found.append(_line(model, entry, row.workers(setting.workers), wrong))
    return found


def _model(outcomes: Iterable[Outcome]) -> _Model | None:
    """Returns the model, which all runs share; None if no run saved it."""
    saved = next((each.parameters for each in outcomes if each.parameters.exists()), None)
    if saved is None:
        return None
    tensors = list(load_file(saved).values())
    types = {_TYPES.get(each.dtype, str(each.dtype).removeprefix("torch.")) for each in tensors}
    return _Model(
        size=sum(each.nbytes for each in tensors),
        count=sum(each.numel() for each in tensors),
        type=types.pop() if len(types) == 1 else "mixed",
    )


def _exchanged(entry: Entry) -> bool:
    """Whether the row exchanged anything in a known or withheld time."""
    sent = entry.number("bytes_sent_per_step")
    return sent is not None and any(sent.values) and (entry.withheld is not None or _seconds(entry) > 0)


def _line(model: _Model, entry: Entry, n: int, wrong: int | None) -> Bandwidth:
    seconds, shown = _seconds(entry), entry.withheld is None
    return Bandwidth(
        setting=entry.setting,
        row=entry.row,
        size=model.size,
        count=model.count,
        type=model.type,
        redop="avg" if entry.synchronous else "none",
        time=1e6 * seconds if shown else None,
        algbw=algbw(model.size, seconds) if shown else None,
        busbw=busbw(model.size, seconds, n) if shown else None,
        wrong=wrong,
    )


def _seconds(entry: Entry) -> float:
    """Returns the seconds of one exchange; 0 if not measured."""
    exposed, hidden = entry.number("exposed_ms"), entry.number("hidden_ms")
    if exposed is None or hidden is None:
        return 0.0
    both = zip(exposed.values, hidden.values, strict=True)
    known = [(one + other) / 1e3 for one, other in both if one is not None and other is not None]
    return median(known) if known else 0.0
