"""Judges every recorded step of all runs by itself, beside torch's optimizer in one process.

Law: a step begins from recorded parameters, so rounding of earlier steps does not count. What it must do
follows from the gradients that autograd made on each rank. The difference is measured against the update, not
against the weight, so small learning rates are judged as strictly as large ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from hubring.workers.compare.gate import asynchronous_steps, recorded_steps, synchronous_steps
from hubring.workers.compare.gate.hub_rules import check_rules
from hubring.workers.compare.gate.recorded_steps import Recording
from hubring.workers.compare.gate.same_samples import (
    RunSamples,
    check_alike,
    check_shares,
    check_within,
    reference,
)
from hubring.workers.compare.gate.step_reference import Checked, StepFault
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import RunOutcome, audit_file

UNKNOWN = (
    "The samples of some runs were not recorded, and are not compared: pass the model to"
    " hubring.DistributedOptimizer, call the model itself, and repeat runs of an earlier version."
)


class RunCheck(Struct, frozen=True):
    """The steps of one run.

    Attributes:
        run: The run.
        checked: What its steps show.
        facts: What makes a rank's gradients differ, by right, from those of the whole batch.
        advice: What could not be judged, in a sentence; empty if nothing.
        samples: The samples that it trained on; None: not recorded.
        still: Elements that no step changed: parameter and place. Compressed gradients may do so.
        moved: Steps before which elements changed that are not recorded in every step; None: not known.
    """

    run: PlannedRun
    checked: Checked
    facts: frozenset[str] = frozenset()
    advice: str = ""
    samples: RunSamples | None = None
    still: frozenset[tuple[str, int]] = frozenset()
    moved: frozenset[int] | None = None

    def after(self, check: Callable[..., str | None], *given: Any) -> RunCheck:
        """Returns this with what a further check raises, or advises; the first fault and advice count."""
        if self.checked.fault:
            return self
        try:
            said = check(*given)
            return replace(self, advice=self.advice or said or "")
        except StepFault as fault:
            return replace(self, checked=replace(self.checked, fault=fault.text, step=fault.step))


class Single(Struct, frozen=True):
    """The steps of a single process, and what they show of the script. Other runs take the same batches.

    A single process exchanges nothing. If its steps are not what the replay expects, then the script does
    something that the replay does not know, in every row.

    Attributes:
        samples: What it trained on; None: not recorded.
        unjudged: Why this script's steps cannot be replayed; empty if they can.
        exchange: Whether its exchanges can be judged.
    """

    samples: RunSamples | None = None
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
        samples = RunSamples.of("local", [trainers])
        checked = synchronous_steps.check([trainers], tolerance, others=[recording.others])
        if not checked.fault:
            return cls(samples)
        where = f"step {checked.step}: " if checked.step else ""
        why = f"the script does something that the replay does not know ({where}{checked.fault})"
        exchanged = synchronous_steps.check([trainers], tolerance, why, others=[recording.others])
        return cls(samples, why, exchange=not exchanged.fault)


def check_runs(
    outcomes: Mapping[str, RunOutcome], tolerance: float, checking: Callable[[str], None] = lambda _: None
) -> dict[str, RunCheck]:
    """Returns the checks by label, of the runs that recorded their steps.

    A run that lost a process or diverged has none. Rows with compressed gradients or backup workers, whose
    steps need not be those of the mean gradient, have one if something else is wrong.

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
            check = check_run(run, ranks, tolerance, singles.get(_place(run)))
            found[run.label] = check.after(check_rules, outcome, [rank.trainers for rank in ranks])
    checks = without_strangers(with_samples({label: found[label] for label in outcomes if label in found}))
    return {label: each for label, each in checks.items() if each.checked.taken or each.checked.fault}


def check_run(
    run: PlannedRun, ranks: Sequence[Recording], tolerance: float, single: Single | None = None
) -> RunCheck:
    """Judges one run.

    Args:
        run: The run.
        ranks: Every rank's recording.
        tolerance: Allowed difference of an update, relative to the update.
        single: The steps of a single process with the same batches; None without one.
    """
    steps, single = [rank.trainers for rank in ranks], single or Single()
    others, checked = [rank.others for rank in ranks if run.row.exact], Checked(0, 0)
    rule = partial(synchronous_steps.check, others=others) if run.row.exact else asynchronous_steps.check
    if _can_be_judged(run, ranks):
        checked = rule(steps, tolerance, single.unjudged, exchange=single.exchange)
    facts = frozenset[str]().union(*(rank.facts for rank in ranks))
    every = [one for rank in steps for own in rank.values() for one in own] if checked.taken else []
    still = frozenset((one.layout.names[number], element) for one in every for number, element in one.still)
    samples = RunSamples.of(run.row.name, steps)
    moved = frozenset(one.step for one in every if one.moved) if any(others) else None
    check = RunCheck(run, checked, facts, samples=samples, still=still, moved=moved)
    check = replace(check, advice=UNKNOWN) if samples is None else check.after(check_within, samples)
    shared = samples is not None and run.row.exact
    return check.after(check_shares, samples, single.samples) if shared else check


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
    """Returns the recordings of all ranks; empty if the run did not finish, or recorded no step."""
    run, files = outcome.run, [audit_file(outcome.folder, rank) for rank in range(len(outcome.results))]
    if run.setting.fault is not None or outcome.failed or outcome.diverged or outcome.unseen:
        return []
    if not files or not all(file.exists() for file in files):
        return []
    checking(run.label)
    ranks = recorded_steps.joined([recorded_steps.read(file) for file in files])
    return ranks if any(steps for rank in ranks for steps in rank.trainers.values()) else []


def _can_be_judged(run: PlannedRun, ranks: Sequence[Recording]) -> bool:
    """Whether steps must be those of mean gradients, or of one gradient each."""
    steps = [one for rank in ranks for each in rank.trainers.values() for one in each[:1]]
    return run.row.exact or not (run.row.synchronous or any(one.layout.lockstep for one in steps))


def with_samples(checks: Mapping[str, RunCheck]) -> dict[str, RunCheck]:
    """Adds what the runs' samples show beside those of other rows with the same seed."""
    alike: defaultdict[tuple[int, int], list[RunSamples]] = defaultdict(list)
    for check in checks.values():
        if check.samples is not None and check.run.row.rule != "backup":  # late workers leave out steps
            alike[_place(check.run)].append(check.samples)

    def compared(check: RunCheck) -> RunCheck:
        own, others = check.samples, alike[_place(check.run)]
        if own is None or not any(own is other for other in others):
            return check
        # If no run can be taken as right, none is: each is compared with one that differs from it.
        strange = (other for other in others if other.digests != own.digests)
        right = reference(others) or next(strange, own)
        return check.after(check_alike, own, right)

    return {label: compared(check) for label, check in checks.items()}


def without_strangers(checks: dict[str, RunCheck]) -> dict[str, RunCheck]:
    """Finds runs whose parameters changed between steps, or not in them, unlike those of other rows.

    A script may change parameters itself. It then does so in every row.
    """
    alike: defaultdict[tuple[int, int], list[RunCheck]] = defaultdict(list)
    for each in checks.values():
        alike[_place(each.run)].append(each)

    def check(one: RunCheck) -> str:
        others = alike[_place(one.run)]
        exact = [other for other in others if other.run.row.exact and one.run.row.exact]
        _check_changes(one.checked.written, [other.checked.written for other in exact])
        known = [{name for name, _ in other.still} for other in others if other.checked.taken]
        if stuck := [each for each in sorted(one.still) if not all(each[0] in names for names in known)]:
            (name, element), number = stuck[0], len(stuck)
            said = f"{number} element{'s' * (number > 1)} of its parameters, as number {element} of {name}"
            raise StepFault(0, f"{said}, had gradients and did not change; in other rows all elements did")
        _check_changes(one.moved or frozenset(), [each.moved for each in exact if each.moved is not None])
        return ""

    return {label: one.after(check, one) for label, one in checks.items()}


def _check_changes(own: frozenset[int], others: Sequence[frozenset[int]]) -> None:
    """Raises StepFault if parameters changed before a step, and did not in all rows."""
    if others and (strange := own - frozenset[int].intersection(*others)):
        text = "parameters changed between the last step and this one, and in other rows they did not"
        raise StepFault(min(strange), text)
