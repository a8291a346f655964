"""Bandwidth: what the exchanges of a training come to, in the columns of nccl-tests.

- size, count, type: of the model that was trained; a step exchanges all of it once.
- redop: `avg` where a step takes the mean gradient, `none` where every gradient is applied by itself.
- time: exposed_ms + hidden_ms (`hubring.workers.compare.judge.measure`), which is how long a step had
something on
  its way: handed over, and not back. Both are of the same steady steps; mean over these and workers, median
  over seeds. It holds the wait for slower workers, and where the server steps its step; where workers
  step, theirs is not in it.
- algbw, busbw: `hubring.workers.compare.result.nccl_tests`, which says what busbw means for a hub.
- wrong: elements of the parameters that the gate found farther from the first synchronous row's than it
  allows, over all seeds; None where it held nothing against that row. nccl-tests checks each result by
  itself; here the parameters show what all exchanges before them have left.

A row has no line where the time is not known or nothing was exchanged, nor where a worker was lost, as
there the number of ranks is not one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import counted
from hubring.workers.compare.judge.gate import Gate
from hubring.workers.compare.judge.summary import Summary
from hubring.workers.compare.result.nccl_tests import algbw, busbw
from hubring.workers.compare.run.outcome import Outcome

_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
}
"""As nccl-tests calls them."""


@dataclass(frozen=True, slots=True)
class _Model:
    size: int
    count: int
    type: str


def bandwidth(
    experiment: Experiment, outcomes: Mapping[str, Outcome], gate: Gate, summaries: Iterable[Summary]
) -> list[dict[str, Any]]:
    """One line for every row of every setting that has one, as `findings.Bandwidth`.

    Args:
        experiment: What was run.
        outcomes: By label.
        gate: What it found.
        summaries: The rows' numbers.
    """
    model = _model(outcomes.values())
    if model is None:
        return []
    return [
        _line(model, summary, gate.wrong(_labels(experiment, summary)))
        for summary in summaries
        if summary.setting.fault is None and _exchanged(summary)
    ]


def _model(outcomes: Iterable[Outcome]) -> _Model | None:
    """That of all runs; None where none has come as far as to save it."""
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


def _labels(experiment: Experiment, summary: Summary) -> set[str]:
    found = [counted(experiment, summary.setting, summary.row, seed) for seed in summary.seeds]
    return {run.label for runs in found for run in runs}


def _exchanged(summary: Summary) -> bool:
    """Whether anything was, for a time that is known or withheld."""
    sent = any(summary.numbers["bytes_sent_per_step"] or ())
    return sent and (summary.withheld is not None or _seconds(summary) > 0)


def _line(model: _Model, summary: Summary, wrong: int | None) -> dict[str, Any]:
    seconds, n = _seconds(summary), summary.row.workers(summary.setting.workers)
    shown = summary.withheld is None
    return {
        "setting": summary.setting.key,
        "row": summary.row.name,
        "size": model.size,
        "count": model.count,
        "type": model.type,
        "redop": "avg" if summary.row.synchronous else "none",
        "time": 1e6 * seconds if shown else None,
        "algbw": algbw(model.size, seconds) if shown else None,
        "busbw": busbw(model.size, seconds, n) if shown else None,
        "wrong": wrong,
    }


def _seconds(summary: Summary) -> float:
    """Of one exchange; 0 where that was not measured."""
    parts = [summary.numbers[name] or [] for name in ("exposed_ms", "hidden_ms")]
    known = [
        (exposed + hidden) / 1e3
        for exposed, hidden in zip(*parts, strict=False)
        if exposed is not None and hidden is not None
    ]
    return median(known) if known else 0.0
