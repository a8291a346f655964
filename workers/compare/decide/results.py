"""From the outcomes of an experiment to its findings, from which all reports are made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from safetensors.torch import load_file

from hubring.workers.compare.decide.decision import Comparisons
from hubring.workers.compare.decide.reasons import crossovers
from hubring.workers.compare.decide.verdict import answer, verdict
from hubring.workers.compare.findings import Bandwidth, CurvePoint, Findings, RowResult, RunCurve, thinned
from hubring.workers.compare.gate import equal_work, same_parameters
from hubring.workers.compare.gate.same_parameters import Judgement
from hubring.workers.compare.measure import Numbers, began, one_of, seen, staleness, steps_of
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.row import Row
from hubring.workers.compare.plan.run_order import PlannedRun, again, counted
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.predict.calibrations import Constants
from hubring.workers.compare.predict.score import calibrated, predicted
from hubring.workers.compare.run.outcome import RunOutcome, disturbed
from hubring.workers.compare.run.timeline import worst_clock
from hubring.workers.compare.statistics import (
    NUMBERS,
    SPEEDS,
    Load,
    MeasurementNoise,
    Number,
    Repeat,
)
from hubring.workers.peers.nccl_tests import algbw, busbw

MOST = 400
"""Most points of a curve; more than a screen shows."""


def curve(outcome: RunOutcome, setting: str, metric: str) -> RunCurve:
    """Returns the curves of one run in the setting with this key.

    `loss` is the mean training loss of all ranks per step; above `MOST` points, neighbours are averaged.
    `metric` is rank 0's. Samples are those of all workers up to then
    (`hubring.workers.compare.measure`). Points before second 0 are drawn at 0.
    """
    zero, first = began(outcome), outcome.records[0]
    points = [
        (line, CurvePoint(round(max(0.0, line["seconds"] - zero), 6), float(samples), math.nan))
        for line, samples in zip(first, seen(outcome), strict=True)
    ]
    # After a lost worker, ranks have different numbers of steps.
    together = zip(*(steps_of(record) for record in outcome.records), strict=False)
    steps = zip((point for line, point in points if "samples" in line), together, strict=False)
    losses = [
        replace(point, value=fmean(line["loss"] for line in ranks))
        for point, ranks in steps
        if all("loss" in line for line in ranks)
    ]
    return RunCurve(
        setting=setting,
        row=outcome.run.row.name,
        seed=outcome.run.seed,
        loss=thinned(losses, MOST),
        metric=[replace(point, value=line[metric]) for line, point in points if metric in line],
    )


def results(
    experiment: Experiment,
    outcomes: Mapping[str, RunOutcome],
    numbers: Mapping[str, Numbers],
    machine: Mapping[str, Any],
    command: str,
    constants: Constants | None = None,
    checking: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Judges the runs, summarises them and writes the verdict.

    Args:
        experiment: The experiment.
        outcomes: By label, in the order of the runs.
        numbers: Result of `measure` for each run, by label.
        machine: Description of the machine.
        command: The command that the user typed.
        constants: Constants of the machine; None: not measured, so nothing is predicted.
        checking: Called with the label of each run before its steps are judged.
    """
    judged = same_parameters.judge(experiment, outcomes, checking)
    judged = replace(judged, checks={**judged.checks, **equal_work.unrecorded(outcomes, judged.checks)})
    missing = equal_work.incomplete(experiment, outcomes)
    numbers = {**numbers, **{label: dict.fromkeys(numbers[label]) for label in missing}}
    unequal = equal_work.unequal(experiment, outcomes, numbers, judged, missing)
    runs = JudgedRuns(experiment, outcomes, numbers, judged, missing, unequal)
    measured = Findings(
        command=command,
        asked=experiment,
        job=experiment.yardstick,
        machine=dict(machine),
        noise=runs.noise(),
        conditions=equal_work.recorded(outcomes),
        settings=experiment.settings,
        gate=judged.gate,
        rows=runs.rows,
        curves=list(runs.curves()),
        bandwidth=list(runs.bandwidth()),
        commands={label: list(outcome.commands) for label, outcome in outcomes.items()},
        scripts={label: outcome.script for label, outcome in outcomes.items() if outcome.script},
        clocks=worst_clock(outcome.clocks for outcome in outcomes.values()),
    )
    model = calibrated(measured, constants)
    compared = Comparisons(predicted(measured, model))
    crossover = crossovers(compared, model)
    found = replace(compared.findings, crossover=crossover)
    return replace(found, verdict=verdict(compared, crossover), answer=answer(compared))


class JudgedRuns(Struct, frozen=True, dict=True):
    """All runs of an experiment, and what the gate says of them.

    Attributes:
        experiment: The experiment.
        outcomes: By label, in the order of the runs.
        numbers: Result of `measure` for each run, by label.
        judged: Result of the gate, which decides what to withhold.
        incomplete: Why runs lack reports or steps, by label.
        unequal: Why the speed of runs is withheld, by label, though each of their steps is right.
    """

    experiment: Experiment
    outcomes: Mapping[str, RunOutcome]
    numbers: Mapping[str, Numbers]
    judged: Judgement
    incomplete: Mapping[str, str] = {}
    unequal: Mapping[str, str] = {}

    def closed_to(self, runs: Collection[str]) -> str | None:
        """Returns why the speed of these runs, by label, is withheld; None if it is not."""
        why = [self.judged.closed_to(runs), *(self.unequal[run] for run in runs if run in self.unequal)]
        return "; ".join(filter(None, dict.fromkeys(why))) or None

    @cached_property
    def failures(self) -> dict[str, str]:
        """Why runs have no comparable end, by label."""
        endless = f"its last {self.experiment.yardstick.metric} is not finite"
        found = {
            label: each.failed
            or self.incomplete.get(label)
            or ("" if self.numbers[label]["final_metric"] is not None else endless)
            for label, each in self.outcomes.items()
        }
        return {label: why for label, why in found.items() if why}

    @cached_property
    def disturbed(self) -> dict[str, str]:
        """What disturbed runs, by label."""
        return disturbed(self.outcomes)

    @cached_property
    def rows(self) -> list[RowResult]:
        """One entry for every row of every setting."""
        return [self._row(*each) for each in product(self.experiment.settings, self.experiment.ways)]

    def _row(self, setting: Setting, row: Row) -> RowResult:
        by_seed = [counted(self.experiment, setting, row, seed) for seed in self.experiment.seeds]
        labels = [run.label for runs in by_seed for run in runs]
        whole = [label for label in labels if not self.outcomes[label].crashed]
        failed = [self.failures[label] for label in labels if label in self.failures]
        upset = [self.disturbed[label] for label in labels if label in self.disturbed]
        withheld = self.closed_to(labels)
        ended = [result or {} for label in labels for result in self.outcomes[label].results]
        over = sorted({str(result["backend"]) for result in ended if result.get("backend")})
        timed = withheld is None and all(self.numbers[label]["step_ms"] is not None for label in whole)
        return RowResult(
            setting=setting.key,
            row=row.name,
            about=row.about + (f", over {' and '.join(over)}" if over else ""),
            synchronous=row.synchronous,
            exact=row.exact,
            emulated=row.meets(setting).emulated,
            seeds=list(self.experiment.seeds),
            withheld=withheld,
            disturbed=f"{upset[0]} in {len(upset)} of {len(labels)} runs of {row.name}" if upset else None,
            failed=f"{len(failed)} of {len(labels)} runs: {failed[0]}" if failed else None,
            partly=0 < len(failed) == len(labels) - len(whole) < len(labels),
            numbers={
                name: None if name in SPEEDS and not timed else self._number(name, by_seed)
                for name in NUMBERS
            },
            staleness=dict(sum((staleness(self.outcomes[label]) for label in labels), Counter())),
        )

    def _number(self, name: str, by_seed: Sequence[Sequence[PlannedRun]]) -> Number | None:
        of_turns = max if NUMBERS[name].worst else median
        return Number.of(
            [one_of([self.numbers[run.label][name] for run in runs], of_turns) for runs in by_seed]
        )

    def curves(self) -> Iterator[RunCurve]:
        """Yields the curves of the first turn; a run that counts in several settings is drawn in the first.

        A run that failed has none: its end is not that of its row, and would end the line of the other seeds.
        """
        shut = {(each.setting, each.row) for each in self.rows if each.withheld is not None}
        for label, outcome in self.outcomes.items():
            run = outcome.run
            if run.turn or label in self.failures or self.closed_to({label}):
                continue
            settings = self.experiment.settings
            key = next(each.key for each in settings if run.row.meets(each) == run.setting)
            drawn = curve(outcome, key, self.experiment.yardstick.metric)
            if (key, drawn.row) in shut:  # a loss by samples shows no speed, a metric by seconds does
                drawn = replace(drawn, loss=[replace(point, seconds=0.0) for point in drawn.loss], metric=[])
            yield drawn

    def noise(self) -> MeasurementNoise:
        """Returns what limits the accuracy of all speeds."""
        outcomes = list(self.outcomes.values())
        heard = [each for outcome in outcomes for each in outcome.noise]
        ended = [result for outcome in outcomes for result in outcome.results]
        said = [
            f"{len(self.disturbed)} of {len(outcomes)} runs were disturbed: in {label}, {why}. Repeat the"
            " experiment on a machine that does nothing else."
            for label, why in list(self.disturbed.items())[:1]
        ]
        return MeasurementNoise(
            load=_load([load for each in heard for load in each.load]) or Load(),
            foreign=_load([each.foreign for each in heard]),
            stolen=_load([each.stolen for each in heard]),
            stalled=_load([each.stalled for each in heard]),
            spread=_spread(self.rows),
            repeat=self._repeat(),
            quiet=not self.disturbed,
            repeated=sum(bool(outcome.instead_of) for outcome in outcomes),
            said=said,
            gpus=any(each and each.get("usage", {}).get("gpu_bytes") for each in ended),  # held at its end
        )

    def _repeat(self) -> Repeat | None:
        """Returns by how much two runs of one row differ; None if a run has no speed."""
        pairs = again(self.experiment)
        speeds = [[self.numbers[run.label]["samples_per_second"] for run in pair] for pair in pairs]
        ratios = [second / first for first, second in speeds if first and second]
        if not ratios or self.closed_to({run.label for pair in pairs for run in pair}):
            return None
        run = pairs[0][0]
        return Repeat(run.setting.key, run.row.name, ratios)

    def bandwidth(self) -> Iterator[Bandwidth]:
        """Yields one line in the columns of nccl-tests for every row of every setting that has one.

        - size, count, type: of the trained model; a step exchanges all of it once.
        - redop: `avg` if a step takes the mean gradient, `none` if every gradient is applied separately.
        - time: exposed_ms + hidden_ms (`measure`): how long a step had an exchange in progress. Both cover
          the same steady steps; mean over these and workers, median over seeds. The time includes the wait
          for slower workers, and the optimizer step if the server steps but not if workers step.
        - algbw, busbw: `hubring.workers.peers.nccl_tests`, which also defines busbw for a hub.
        - wrong: parameter elements that differ from the first synchronous row by more than the gate's
          tolerance, over all seeds; None if nothing was compared with that row. nccl-tests checks each result
          separately; here the parameters show the errors of all earlier exchanges.

        A row has no line if the time is unknown, nothing was exchanged, or a worker was lost, because the
        number of ranks then changes.
        """
        model, pairs = _model(self.outcomes.values()), product(self.experiment.settings, self.experiment.ways)
        for (setting, row), entry in zip(pairs, self.rows, strict=True):
            sent, seconds = entry.number("bytes_sent_per_step"), _seconds(entry)
            shown = entry.withheld is None
            timed = sent is not None and any(sent.values) and (seconds > 0 or not shown)
            if model is None or setting.fault is not None or not timed:
                continue
            runs = [run for seed in entry.seeds for run in counted(self.experiment, setting, row, seed)]
            yield Bandwidth(
                setting=entry.setting,
                row=entry.row,
                **model,
                redop="avg" if entry.synchronous else "none",
                time=1e6 * seconds if shown else None,
                algbw=algbw(model["size"], seconds) if shown else None,
                busbw=busbw(model["size"], seconds, row.workers(setting.workers)) if shown else None,
                wrong=self.judged.wrong({run.label for run in runs}),
            )


def _load(values: Sequence[float | None]) -> Load | None:
    known = [value for value in values if value is not None]
    return Load(median(known), max(known)) if known else None


def _spread(rows: Iterable[RowResult]) -> dict[str, float | None]:
    """Returns the range of step times over seeds, relative to their median: the worst setting's."""
    spread: dict[str, float | None] = {}
    for row in rows:
        step = row.number("step_ms")
        if step is not None and step.seeds > 1:
            known = [value for value in step.values if value is not None]
            apart = (max(known) - min(known)) / step.median
            spread[row.row] = max(apart, spread.get(row.row) or 0.0)
    return spread


_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
}
"""Names of types in nccl-tests."""


def _model(outcomes: Iterable[RunOutcome]) -> dict[str, Any] | None:
    """Returns size, count and type of the model, which all runs share; None if no run saved it."""
    saved = next((each.parameters for each in outcomes if each.parameters.exists()), None)
    if saved is None:
        return None
    tensors = list(load_file(saved).values())
    types = {_TYPES.get(each.dtype, str(each.dtype).removeprefix("torch.")) for each in tensors}
    return {
        "size": sum(each.nbytes for each in tensors),
        "count": sum(each.numel() for each in tensors),
        "type": types.pop() if len(types) == 1 else "mixed",
    }


def _seconds(entry: RowResult) -> float:
    """Returns the seconds of one exchange; 0 if not measured."""
    exposed, hidden = entry.number("exposed_ms"), entry.number("hidden_ms")
    if exposed is None or hidden is None:
        return 0.0
    both = zip(exposed.values, hidden.values, strict=True)
    known = [(one + other) / 1e3 for one, other in both if one is not None and other is not None]
    return median(known) if known else 0.0
