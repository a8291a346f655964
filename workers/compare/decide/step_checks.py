"""Judges every recorded step of all runs by itself, beside torch's optimizer in one process.

Law: a step begins from recorded parameters, so rounding of earlier steps does not count. What it must do
follows from the gradients that autograd made on each rank. The difference is measured against the update, not
against the weight, so small learning rates are judged as strictly as large ones.

The mean over ranks gives all of them the same weight. If their numbers of samples differ, the script must
weigh its losses. Whether it does shows in the same step of a single process with the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from msgspec import Struct
from msgspec.structs import replace

from hubring.workers.compare.decide import asynchronous_steps, recorded_steps, synchronous_steps
from hubring.workers.compare.decide.recorded_steps import RecordedStep, Recording, StepsOfOptimizers
from hubring.workers.compare.decide.step_reference import Checked, StepFault
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import Line, RunOutcome, audit_file

CLEARER = 3.0
"""By how much closer to the single process the weighted mean must be than the equal one."""

SEEN = 1e-3
"""Smallest difference of the equal mean, relative to the gradient, that counts."""

ALIKE_STEPS = 3
"""After so many steps with equal gradients, two ranks train on the same samples."""

Samples = Mapping[int, Sequence[float]]
"""Every rank's reported samples, by step."""

SHARES_FIX = (
    "multiply each worker's mean loss by its samples * hubring.size() / all samples, or use drop_last=True"
)


def same_samples(ranks: Sequence[Sequence[RecordedStep]], alone: Sequence[RecordedStep]) -> int:
    """Compares the ranks' gradients with each other, and with those of a single process if all are the same.

    Args:
        ranks: Every rank's steps.
        alone: The steps of the single process; empty without one.

    Returns:
        A rank whose gradients are those of rank 0 in all steps, if no single process shows whether that is
        right; else 0.

    Raises:
        StepFault: It is wrong, because the single process has other gradients.
    """
    for rank in range(1, len(ranks)):
        pairs = [pair for pair in zip(ranks[0], ranks[rank], strict=False) if bool(pair[0].own.any())]
        if len(pairs) < ALIKE_STEPS or not all(torch.equal(one.own, other.own) for one, other in pairs):
            continue
        if not alone or alone[0].own.shape != ranks[0][0].own.shape:
            return rank
        whole, own = alone[0].own.double(), ranks[0][0].own.double()
        if float((whole - own).norm()) > SEEN * float(whole.norm()):
            text = f"ranks 0 and {rank} computed the same gradients in all {len(pairs)} steps, unlike local"
            raise StepFault(0, f"{text}, so they train on the same samples; use hubring.ShardedSampler")
    return 0


def uneven(
    ranks: Sequence[Sequence[RecordedStep]], samples: Samples, alone: Sequence[RecordedStep]
) -> list[int]:
    """Compares steps with uneven samples with those of a single process.

    Args:
        ranks: Every rank's steps.
        samples: Their samples.
        alone: The steps of the single process; empty without one.

    Returns:
        The uneven steps that could not be compared, in order.

    Raises:
        StepFault: The ranks' gradients have the same weight, and should not.
    """
    single = {one.step: one.own.double() for one in alone}
    unknown = []
    for each in zip(*ranks, strict=False):
        step, counts = each[0].step, samples.get(each[0].step, ())
        if len(set(counts)) < 2 or len(counts) != len(each):
            continue
        own = torch.stack([one.own.double() for one in each])
        whole = single.get(step)
        if whole is None or whole.shape != own[0].shape:
            unknown.append(step)
            continue
        weights = torch.tensor(counts, dtype=torch.float64)
        weighted = (own * (weights / weights.sum())[:, None]).sum(0)
        equal, other = float((whole - own.mean(0)).norm()), float((whole - weighted).norm())
        if equal > SEEN * float(whole.norm()) and equal > CLEARER * other:
            took = " and ".join(f"{count:g}" for count in counts)
            raise StepFault(
                step, f"workers took {took} samples, and their gradients have the same weight; {SHARES_FIX}"
            )
    return unknown


class RunCheck(Struct, frozen=True):
    """The steps of one run.

    Attributes:
        run: The run.
        checked: What its steps show.
        facts: What makes a rank's gradients differ, by right, from those of the whole batch.
        advice: What could not be judged, in a sentence; empty if nothing.
    """

    run: PlannedRun
    checked: Checked
    facts: frozenset[str] = frozenset()
    advice: str = ""


class Single(Struct, frozen=True):
    """The steps of a single process, and what they show of the script. Other runs take the same batches.

    A single process exchanges nothing. If its steps are not what the replay expects, then the script does
    something that the replay does not know, in every row.

    Attributes:
        trainers: The steps by optimizer; empty without a single process.
        unjudged: Why this script's steps cannot be replayed; empty if they can.
        exchange: Whether its exchanges can be judged.
    """

    trainers: StepsOfOptimizers = {}
    unjudged: str = ""
    exchange: bool = True

    @classmethod
    def of(cls, recording: Recording, tolerance: float) -> Single:
        """Returns the steps with what can be judged.

        Args:
            recording: The process's recording.
            tolerance: Allowed difference of an update, relative to the update.
        """
        trainers = recording.trainers
        checked = synchronous_steps.check([trainers], tolerance)
        if not checked.fault:
            return cls(trainers)
        where = f"step {checked.step}: " if checked.step else ""
        why = f"the script does something that the replay does not know ({where}{checked.fault})"
        exchanged = synchronous_steps.check([trainers], tolerance, why)
        return cls(trainers, why, exchange=not exchanged.fault)


def check_runs(
    outcomes: Mapping[str, RunOutcome], tolerance: float, checking: Callable[[str], None] = lambda _: None
) -> dict[str, RunCheck]:
    """Returns the checks by label, of the runs that recorded their steps.

    A run that lost a process or diverged has none, and neither has a row with compressed gradients or backup
    workers, whose steps need not be those of the mean gradient.

    Args:
        outcomes: By label.
        tolerance: Allowed difference of an update, relative to the update.
        checking: Called with the label of each run before its steps are judged.
    """
    found: dict[str, RunCheck] = {}
    singles: dict[tuple[int, int], Single] = {}
    with _one_thread():
        # A single process comes first: others are compared with it.
        for outcome in sorted(outcomes.values(), key=lambda each: each.run.row.name != "local"):
            run = outcome.run
            if not (ranks := _recordings(outcome, checking)):
                continue
            if run.row.name == "local":
                singles[_place(run)] = Single.of(ranks[0], tolerance)
            single = singles.get(_place(run), Single())
            found[run.label] = check_run(run, ranks, outcome.records, tolerance, single)
    return without_strangers({label: found[label] for label in outcomes if label in found})


def check_run(
    run: PlannedRun,
    ranks: Sequence[Recording],
    records: Sequence[Sequence[Line]],
    tolerance: float,
    single: Single | None = None,
) -> RunCheck:
    """Judges one run.

    Args:
        run: The run.
        ranks: Every rank's recording.
        records: Every rank's reports.
        tolerance: Allowed difference of an update, relative to the update.
        single: The steps of a single process with the same batches; None without one.
    """
    steps, single = [rank.trainers for rank in ranks], single or Single()
    rule = synchronous_steps if run.row.exact else asynchronous_steps
    checked = rule.check(steps, tolerance, single.unjudged, exchange=single.exchange)
    facts = frozenset[str]().union(*(rank.facts for rank in ranks))
    if not run.row.exact or checked.fault or len(ranks) < 2:
        return RunCheck(run, checked, facts)
    samples, advice = _samples(records), ""
    try:
        for trainer in sorted(set().union(*steps)):
            own, alone = [each.get(trainer, ()) for each in steps], single.trainers.get(trainer, ())
            twin, unknown = same_samples(own, alone), uneven(own, samples, alone)
            advice = advice or _advice(run.row.name, twin, unknown, samples)
    except StepFault as fault:
        return RunCheck(run, replace(checked, fault=fault.text, step=fault.step), facts)
    return RunCheck(run, checked, facts, advice)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch use one thread. The recorded elements are few, and idle threads of torch spin."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def _place(run: PlannedRun) -> tuple[int, int]:
    """Returns what is equal for runs that take the same batches: the workers and the seed."""
    return run.setting.workers, run.seed


def _recordings(outcome: RunOutcome, checking: Callable[[str], None]) -> list[Recording]:
    """Returns the recordings of all ranks; empty if the run did not finish, or is not to be judged."""
    run, files = outcome.run, [audit_file(outcome.folder, rank) for rank in range(len(outcome.results))]
    if run.setting.fault is not None or (run.row.synchronous and not run.row.exact):
        return []
    if outcome.failed or outcome.diverged or not files or not all(file.exists() for file in files):
        return []
    checking(run.label)
    ranks = recorded_steps.joined([recorded_steps.read(file) for file in files])
    steps = [one for rank in ranks for each in rank.trainers.values() for one in each[:1]]
    backup_workers = not run.row.exact and any(one.layout.lockstep for one in steps)
    return ranks if steps and not backup_workers else []


def _samples(records: Sequence[Sequence[Line]]) -> dict[int, list[float]]:
    """Returns every rank's samples by step, of the steps that all ranks reported."""
    ranks = [
        {line["step"]: float(line["samples"]) for line in lines if "samples" in line} for lines in records
    ]
    together = set(ranks[0]).intersection(*ranks) if ranks else set()
    return {step: [rank[step] for rank in ranks] for step in sorted(together)}


def _advice(row: str, twin: int, unknown: Sequence[int], samples: Samples) -> str:
    if twin:
        return (
            f"Ranks 0 and {twin} of {row} computed the same gradients in all steps. If they should train on"
            " other samples, use hubring.ShardedSampler. Add the row local to check this."
        )
    if not unknown:
        return ""
    took = " and ".join(f"{count:g}" for count in samples[unknown[0]])
    return (
        f"In step {unknown[0]} of {row}, workers took {took} samples, and their gradients have the same"
        f" weight. If the script does not weigh its loss, {SHARES_FIX}. Add the row local to check this."
    )


def without_strangers(checks: dict[str, RunCheck]) -> dict[str, RunCheck]:
    """Finds runs whose parameters changed between two steps, where those of other rows did not.

    A script may change parameters itself. It then does so in every row.
    """
    alike: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for label, each in checks.items():
        if each.run.row.exact:
            alike[_place(each.run)].append(label)
    for labels in alike.values():
        scripts = frozenset[int].intersection(*(checks[label].checked.written for label in labels))
        for label in labels:
            check = checks[label]
            strange = check.checked.written - scripts
            if strange and not check.checked.fault:
                text = "parameters changed between the last step and this one, and in other rows they did not"
                checks[label] = replace(check, checked=replace(check.checked, fault=text, step=min(strange)))
    return checks
