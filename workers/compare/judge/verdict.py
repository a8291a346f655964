"""The verdict: the results in plain sentences. A row wins only if the intervals show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import fmean

from hubring.workers.compare.experiment.row import meets
from hubring.workers.compare.judge import hub_vs_ring
from hubring.workers.compare.judge.hardships import hardships
from hubring.workers.compare.result.comparisons import Comparisons
from hubring.workers.compare.result.findings import Crossover, Findings, Gate, Number
from hubring.workers.compare.result.ratio import Ratio
from hubring.workers.compare.result.setting_text import Scope, listed, not_decided, scopes, with_servers


def verdict(compared: Comparisons) -> list[str]:
    """Returns the sentences, from what is withheld to how reliable the results are.

    Args:
        compared: The comparisons of findings without a verdict.
    """
    parts: list[Callable[[Scope], list[str]]] = [
        _withheld,
        _failed,
        _to_target,
        hub_vs_ring.hub_against_ring,
        _against_one_process,
        hub_vs_ring.asynchronous,
    ]
    findings = compared.findings
    texts = [sentence for part in parts for scope in scopes(compared) for sentence in part(scope)]
    return [*dict.fromkeys(texts), *_crossover(findings), *hardships(compared), *_caveats(findings)]


def _withheld(scope: Scope) -> list[str]:
    return [
        scope.say(f"no speed is shown for {row.row}: {row.withheld}.")
        for row in scope.rows
        if row.withheld is not None
    ]


def _failed(scope: Scope) -> list[str]:
    failed = {row.row: row.failed.rstrip(".") for row in scope.rows if row.failed is not None}
    return [scope.say(f"{name} failed {_after_loss(scope, name)}in {why}.") for name, why in failed.items()]


def _after_loss(scope: Scope, row: str) -> str:
    fault = meets(row, scope.setting).fault
    return "" if fault is None else f"after {fault.words} was lost at step {fault.step}, "


def _to_target(scope: Scope) -> list[str]:
    """Returns which rows reach the target first, how much longer the others take, and which miss it."""
    job = scope.findings.job
    if job.target is None:
        return []
    goal = f"{job.title} {job.target:g}"
    times = {name: scope.number(name, "seconds_to_target") for name in scope.names}
    missed = [scope.say(f"{listed(names)} {how.format(goal)}.") for how, names in _missing(scope).items()]
    racing = {name: time for name, time in times.items() if time and time.complete}
    order = sorted(racing, key=lambda name: _mean_log(racing[name]))  # as the ratios compare them
    if not order:
        return missed
    for one, other in combinations(order, 2):  # the numbers choose the first row, so all pairs count
        scope.ratio("seconds_to_target", one, other)
    first = order[0]
    behind = {name: scope.ratio("seconds_to_target", name, first) for name in order[1:]}
    if doubt := next((ratio.doubt for ratio in behind.values() if ratio and ratio.doubt), ""):
        return [
            scope.say(f"not decided on this machine: which row is first to reach {goal}, because {doubt}."),
            *missed,
        ]
    near = {name: ratio for name, ratio in behind.items() if ratio is None or not ratio.decided}
    later = [f"{name} takes {ratio} times as long" for name, ratio in behind.items() if name not in near]
    seconds = sorted(racing[name].median for name in (first, *near))
    if near:
        span = f"in {seconds[0]:.2f} to {seconds[-1]:.2f} s"
        begin = f"first to reach {goal} are {listed((first, *near))}, {_alike(near, span)}"
    else:
        begin = f"first to reach {goal} is {first}, in {seconds[0]:.2f} s"
    return [scope.say(f"{begin}{'; ' if later else ''}{', '.join(later)}."), *missed]


def _mean_log(time: Number) -> float:
    """Returns the logarithm of the geometric mean over the seeds."""
    return fmean(math.log(value) if value else -math.inf for value in time.values)


def _alike(near: Mapping[str, Ratio | None], span: str) -> str:
    """Describes how close the first rows are, none of which is clearly later."""
    even = all(ratio is None or ratio.even for ratio in near.values())
    return f"{'equally fast' if even else 'with no clear difference'}, {span}"


def _missing(scope: Scope) -> dict[str, list[str]]:
    """Returns the rows that missed the target, by a format of how."""
    found: dict[str, list[str]] = {}
    for row in scope.rows:
        number, seeds = row.number("seconds_to_target"), len(row.seeds)
        reached = 0 if number is None else number.seeds
        if row.withheld or reached == seeds:
            continue
        how = "did not reach {}" if not reached else f"reached {{}} with only {reached} of {seeds} seeds"
        found.setdefault(how, []).append(row.row)
    return found


def _against_one_process(scope: Scope) -> list[str]:
    """Compares the workers with a single process."""
    setting = scope.setting
    if setting.workers < 2 or setting.fault is not None:
        return []
    ratios = {
        name: ratio
        for name in scope.names
        if name != "local" and (ratio := scope.ratio("samples_per_second", name, "local"))
    }
    if not ratios:
        return []
    name = hub_vs_ring.chosen(list(ratios))
    alone = "a single process with as many threads as each worker"
    contest = hub_vs_ring.contest(name, alone, scope, (name, "local"))
    ahead = [other for other, ratio in ratios.items() if ratio.more]
    if ahead and name not in ahead:
        return [scope.say(f"{contest[:-1]}; faster than the single process: {listed(ahead)}.")]
    hindered = setting.link is not None or setting.straggler is not None
    if hindered or not all(ratio.decided and ratio.value < 1 for ratio in ratios.values()):
        return [scope.say(contest)]
    machines = "these machines have" if hub_vs_ring.on_a_cluster(scope.findings) else "this machine has"
    why = f"the job is too small, or {machines} too few cores, to gain from several workers"
    return [scope.say(f"{contest[:-1]}: {why}.")]


def _crossover(findings: Findings) -> list[str]:
    """Returns the number of servers from which the hub wins: measured, predicted, and by bytes alone."""
    texts = []
    for each in findings.crossover:
        tried = ", ".join(map(str, each.tried))
        predicted = f"predicted: {with_servers(each.predicted)}" if each.calibrated else "no prediction"
        texts.append(
            f"{each.setting}, {tried} servers tried: {_measured(each)}; {predicted};"
            f" by bytes alone ({each.formula}): {with_servers(each.by_bytes)}."
        )
    return texts


def _measured(crossover: Crossover) -> str:
    """Returns with how many servers the hub was measured to win, and what is not decided."""
    faster, open_ = "the hub is faster than the ring", crossover.undecided
    if open_ and crossover.measured is None:
        return f"whether {faster} is {not_decided(open_)}"
    known = f"{faster} {with_servers(crossover.measured)}"
    return f"{known}, and it is {not_decided(open_)}" if open_ else known


def _caveats(findings: Findings) -> list[str]:
    """Returns what limits the reliability of the results."""
    texts = []
    experiment = findings.asked
    if experiment.lr == "linear":
        texts.append("All rows used the job's learning rate times their number of workers (lr = linear).")
    if experiment.lr == "per-worker":
        texts.append(
            "Asynchronous rows used the job's learning rate divided by their number of workers"
            " (lr = per-worker)."
        )
    gate = findings.gate
    if any(pair.limit and not pair.passed for pair in gate.pairs):
        texts.append(
            "Rows that should agree do not. One of them is wrong, or this job amplifies rounding, as wide"
            " layers and high learning rates can. If it is rounding, allow more with ps-compare report FOLDER"
            f" --tolerance {10 * gate.tolerance:g}."
        )
        if gate.steps and all(each.passed and each.steps == each.judged for each in gate.steps):
            texts.append(
                "Each step by itself is what one process makes of the workers' gradients. So rows that differ"
                " differ by rounding, or in the samples and random numbers of their gradients."
            )
    texts += dict.fromkeys(pair.advice for pair in gate.pairs if pair.advice)
    texts += dict.fromkeys(each.advice for each in gate.steps if each.advice)
    texts += _unjudged(gate)
    texts += _script_changes(findings)
    if any(row.emulated for row in findings.rows):
        texts.append("Workers slept for part of every step, so the times are those of an emulated machine.")
    if not findings.noise.quiet:
        texts += findings.noise.said
    if findings.noise.gpus:
        texts.append(
            "GPUs were not watched: other programs on them, or lower clock rates, would not show here."
        )
    if len(experiment.seeds) == 1:
        texts.append("One seed decides nothing, because any difference can be chance; use three or more.")
    return texts


def _script_changes(findings: Findings) -> list[str]:
    """Returns that runs used different versions of the user's script; empty if they did not."""
    runs: dict[str, str] = {}
    for label, digest in findings.scripts.items():
        runs.setdefault(digest, label)
    if len(runs) < 2:
        return []
    one, other, *_ = runs.values()
    return [
        f"{findings.job.name} changed between runs: {one} and {other} ran different versions of it, so do not"
        " compare them. To run one version everywhere, use another --out."
    ]


def _unjudged(gate: Gate) -> list[str]:
    """Returns which rows' updates the gate could not replay, by reason."""
    rows: dict[str, dict[str, None]] = {}
    for each in gate.steps:
        if each.unjudged:
            rows.setdefault(each.unjudged, {})[each.row] = None
    return [f"The updates of {listed(list(names))} were not replayed: {why}." for why, names in rows.items()]
