"""What the numbers say, in plain words: nobody is called a winner whom the intervals do not show as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hubring.workers.compare.judge import hub_vs_ring
from hubring.workers.compare.judge.hardships import hardships
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.ratio import Ratio
from hubring.workers.compare.result.setting_text import Scope, listed, scopes
from hubring.workers.compare.result.statistics import by_chance


def verdict(findings: Findings) -> list[str]:
    """Sentences, from what is withheld to how far all of it can be trusted.

    Args:
        findings: This part not yet there.
    """
    parts: list[Callable[[Scope], list[str]]] = [
        _withheld,
        _failed,
        _to_target,
        hub_vs_ring.hub_against_ring,
        _against_one_process,
        hub_vs_ring.asynchronous,
    ]
    said = [sentence for part in parts for scope in scopes(findings) for sentence in part(scope)]
    return [*dict.fromkeys(said), *_crossover(findings), *hardships(findings), *_caveats(findings)]


def _withheld(scope: Scope) -> list[str]:
    return [
        scope.say(f"no speed is shown for {row.row}: {row.withheld}.")
        for row in scope.rows
        if row.withheld is not None
    ]


def _failed(scope: Scope) -> list[str]:
    failed = {row.row: row.failed.rstrip(".") for row in scope.rows if row.failed is not None}
    fault = scope.setting.fault
    if fault is None:
        return [scope.say(f"{name} failed in {why}.") for name, why in failed.items()]
    loss = f"worker {fault.rank} was lost at step {fault.step}"
    return [scope.say(f"{name} failed where {loss}, in {why}.") for name, why in failed.items()]


def _to_target(scope: Scope) -> list[str]:
    """Who was first, who is not shown to be later, how much longer others needed, and who missed it."""
    job = scope.findings.job
    if job.target is None:
        return []
    goal = f"{job.title} {job.target:g}"
    times = {name: scope.number(name, "seconds_to_target") for name in scope.names}
    missed = [scope.say(f"{listed(names)} {how} {goal}.") for how, names in _missing(scope).items()]
    racing = {name: time for name, time in times.items() if time and time.complete}
    order = sorted(racing, key=lambda name: racing[name].median)
    if not order:
        return missed
    first = order[0]
    behind = {name: scope.ratio("seconds_to_target", name, first) for name in order[1:]}
    near = {name: ratio for name, ratio in behind.items() if ratio is None or not ratio.decided}
    later = [f"{name} needs {ratio} times as long" for name, ratio in behind.items() if name not in near]
    seconds = sorted(racing[name].median for name in (first, *near))
    if near:
        span = f"in {seconds[0]:.2f} to {seconds[-1]:.2f} s"
        begin = f"first to {goal} are {listed((first, *near))}, {_alike(near, span)}"
    else:
        begin = f"first to {goal} is {first}, in {seconds[0]:.2f} s"
    return [scope.say(f"{begin}{'; ' if later else ''}{', '.join(later)}."), *missed]


def _alike(near: Mapping[str, Ratio | None], span: str) -> str:
    """How near those are whom nothing shows to be later than the first."""
    apart = [f"{name} {ratio}" for name, ratio in near.items() if ratio and not ratio.even]
    if not apart:
        return f"even {span}"
    return f"not told apart {span}: {listed(apart)} times as long"


def _missing(scope: Scope) -> dict[str, list[str]]:
    """The rows that missed the target, by how, in words."""
    found: dict[str, list[str]] = {}
    for row in scope.rows:
        number, seeds = row.number("seconds_to_target"), len(row.seeds)
        reached = 0 if number is None else number.seeds
        if row.withheld or reached == seeds:
            continue
        how = "did not reach" if not reached else f"reached with {reached} of {seeds} seeds only"
        found.setdefault(how, []).append(row.row)
    return found


def _against_one_process(scope: Scope) -> list[str]:
    """Whether it paid to divide the work at all."""
    ratios = {
        name: ratio
        for name in scope.names
        if name != "local" and (ratio := scope.ratio("samples_per_second", name, "local"))
    }
    if not ratios or scope.setting.workers < 2 or scope.setting.fault:
        return []
    name = hub_vs_ring.chosen(list(ratios))
    alone = "one process alone, with as many threads as each worker"
    contest = hub_vs_ring.contest(name, alone, scope, (name, "local"))
    ahead = [other for other, ratio in ratios.items() if ratio.more]
    if ahead and name not in ahead:
        return [scope.say(f"{contest[:-1]}; faster than that process: {listed(ahead)}.")]
    if not all(ratio.decided and ratio.value < 1 for ratio in ratios.values()):
        return [scope.say(contest)]
    machines = "these machines have" if hub_vs_ring.on_a_cluster(scope.findings) else "this machine has"
    why = f"this job is too small, or {machines} too few cores, for dividing it to pay"
    return [scope.say(f"{contest[:-1]}: {why}.")]


def _crossover(findings: Findings) -> list[str]:
    """From how many servers on the hub wins: measured, predicted, and by bytes alone."""
    said = []
    for each in findings.crossover:
        tried = ", ".join(map(str, each.tried))
        predicted = (
            f"predicted was {_from_on(each.predicted)}, and" if each.calibrated else "nothing was predicted;"
        )
        said.append(
            f"{each.setting}, {tried} servers tried: the hub steps faster than the ring"
            f" {_from_on(each.measured)}; {predicted} by bytes alone ({each.formula})"
            f" {_from_on(each.by_bytes)}."
        )
    return said


def _from_on(servers: float | None) -> str:
    if servers is None:
        return "with no number of servers"
    return f"from {servers:g} server{'' if servers == 1 else 's'} on"


def _caveats(findings: Findings) -> list[str]:
    """How far all of this can be trusted."""
    said = []
    experiment = findings.asked
    if experiment.lr == "linear":
        said.append("All rows were given the job's learning rate times their workers (lr = linear).")
    if experiment.lr == "per-worker":
        said.append(
            "Asynchronous rows were given the job's learning rate divided by their workers (lr = per-worker)."
        )
    if any(pair.limit and not pair.passed for pair in findings.gate.pairs):
        said.append(
            "Rows that should agree do not: one of them is wrong, or this job makes much of rounding, as wide"
            " layers and high learning rates can. If it is rounding, ps-compare report FOLDER --tolerance"
            " 0.001 allows more."
        )
    if any(row.emulated for row in findings.rows):
        said.append("Workers slept for a part of every step: these are times of an emulated machine.")
    if not findings.noise.quiet:
        said.append(f"The machine was not idle. {' '.join(findings.noise.said)}")
    chance = by_chance(len(experiment.seeds))
    return [*said, chance] if chance else said
