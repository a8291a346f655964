"""The verdict: the results in plain sentences, and in one. A row wins only if its ratio is decided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from hubring.workers.compare.decide.decision import SPEED, Comparisons, SettingRows, chosen, lost
from hubring.workers.compare.decide.ratio import EVEN, Decision, Ratio
from hubring.workers.compare.decide.reasons import because, caveats, on_a_cluster
from hubring.workers.compare.findings import Crossover, Findings
from hubring.workers.compare.plan.row import meets
from hubring.workers.compare.plan.setting import listed, straggler
from hubring.workers.compare.predict.exchange_terms import with_servers

_CLOSE = "no clear difference between {first} and {second}: {speeds}, {ratio.factor}"
_PACES = "{first} and {second} show no clear difference in samples per second (a ratio of {ratio})"
PHRASES: Mapping[str, Mapping[Decision, str]] = {
    "speed": {
        Decision.LARGER: "{first} beats {second}: {speeds}, {ratio.factor}.",
        Decision.SMALLER: "{first} loses to {second}: {speeds}, {ratio.inverse.factor}.",
        Decision.EVEN: "{first} is as fast as {second}: {speeds}.",
        Decision.DOUBTFUL: "not decided: {first} against {second}, {speeds}, because {ratio.doubt}.",
        Decision.FEW_SEEDS: _CLOSE + "; fewer than three seeds decide nothing.",
        Decision.LIKE_REPEATS: _CLOSE
        + "; two runs of the same row differ as much on this machine ({ratio.least:.2f}).",
        Decision.AMONG_MANY: _CLOSE
        + "; the range excludes 1, but so can chance in one of {ratio.among} comparisons{ratio.to_decide}.",
        Decision.OPEN: _CLOSE + "{ratio.to_decide}.",
    },
    "answer": {
        Decision.LARGER: "On {here} {first} is {ratio.value:.2f} times as fast{ratio.range} as {second}"
        "{alone_or_job}.",
        Decision.SMALLER: "On {here} {second} is {ratio.inverse.value:.2f} times as fast{ratio.inverse.range}"
        " as {first}{alone_or_job}.",
        Decision.EVEN: "On {here} {both} are equally fast for this job, within {within:.0%}{alone}.",
        Decision.DOUBTFUL: "Not decided between {both}: {ratio.doubt}.",
        Decision.FEW_SEEDS: "Not decided between {both}: run at least three seeds.",
        Decision.LIKE_REPEATS: "On {here} {both} differ by no more than two runs of the same row, so neither"
        " wins{alone}.",
        Decision.AMONG_MANY: "On {here} {both} show no clear difference: the factor's range{ratio.range}"
        " excludes 1, but so can chance in {ratio.among} comparisons{alone}.",
        Decision.OPEN: "On {here} {both} show no clear difference for this job{ratio.to_decide}{alone}.",
    },
    "pace": {
        **dict.fromkeys(Decision, _PACES),
        Decision.LARGER: "{first} processes samples {ratio} times as fast as {second}",
        Decision.SMALLER: "{first} processes samples more slowly than {second}, at {ratio} of its speed",
        Decision.EVEN: "{first} is as fast as {second} in samples per second",
        Decision.DOUBTFUL: "it is not decided whether {first} or {second} processes more samples per second",
    },
    "time": {
        Decision.LARGER: "takes {ratio} times as long to {goal}",
        Decision.SMALLER: "is {ratio.inverse} times as fast to {goal}",
    },
}
"""The words of each kind of comparison for what it decides."""


def phrase(kind: str, ratio: Ratio, **words: object) -> str:
    """Returns what a comparison of this kind decides, in words."""
    return PHRASES[kind][ratio.decision].format(ratio=ratio, **words)


def verdict(compared: Comparisons, crossover: Iterable[Crossover]) -> list[str]:
    """Returns the sentences, from what is withheld to how reliable the results are.

    Args:
        compared: The comparisons.
        crossover: From how many servers on the hub wins.
    """
    before = (_withheld, _failed, _to_target, _hub_against_ring, _against_one_process, _asynchronous)
    first, last = (
        [text for part in parts for scope in compared.scopes for text in part(scope)]
        for parts in (before, (_slowed, _survived))
    )
    crossings = [
        f"{each.setting}, {', '.join(map(str, each.tried))} servers tried: {crossing(each)}"
        for each in crossover
    ]
    return [*dict.fromkeys(first), *crossings, *last, *caveats(compared.findings)]


def answer(compared: Comparisons) -> str:
    """Returns the verdict in one sentence, or in two if a row that does not wait for all has its own."""
    return " ".join(filter(None, (_sooner(compared), _by_speed(compared))))


def _by_speed(compared: Comparisons) -> str:
    """Returns which row is faster. With several settings it counts what each decides."""
    pairs = [
        (scope, scope.pair, ratio)
        for scope in compared.scopes
        if scope.pair is not None and (ratio := scope.ratio(SPEED, *scope.pair)) is not None
    ]
    if not pairs:
        return _nothing(compared.findings)
    if len(pairs) > 1:
        return _count([(scope, _called(scope, pair), ratio) for scope, pair, ratio in pairs])
    [(scope, pair, ratio)] = pairs
    alone = [scope.ratio(SPEED, "local", name) for name in pair if "local" not in pair]
    wins = alone and all(each is not None and each.decision is Decision.LARGER for each in alone)
    beside = "; one process alone is faster" if wins else ""
    first, second = called = _called(scope, pair)
    return phrase(
        "answer",
        ratio,
        here=_here(compared.findings),
        first=_the(first),
        second=_the(second),
        both=listed(called),
        alone=beside,
        alone_or_job=beside or " for this job",
        within=EVEN - 1,
    )


def _sooner(compared: Comparisons) -> str:
    """Returns which rows that do not compute the same reach the target before those that do; or nothing.

    Their speed alone says nothing, since they can be fast and never reach it.
    """
    said = []
    for scope in compared.scopes:
        pair, timed = scope.pair or (), scope.times
        for name in (name for name, _ in scope.asynchronous if timed.keys() >= {name, *pair}):
            behind = [scope.ratio("seconds_to_target", other, name) for other in pair]
            ahead = [each.value for each in behind if each and each.decision is Decision.LARGER]
            if ahead and len(ahead) == len(pair):
                fast = f"{name} is {min(ahead):.2f} times as fast as {listed(pair)}"
                said.append(f"{fast} {scope.where()}".rstrip())
    job = compared.findings.job
    return f"To reach {job.title} {job.target:g}, {'; '.join(said)}." if said else ""


def _called(scope: SettingRows, pair: tuple[str, str]) -> tuple[str, str]:
    """Returns the names of a pair; a single hub row is called the hub."""
    several = sum(name.startswith("hub-") for name in scope.names) > 1
    return ("hub", "ring") if scope.hub_and_ring and not several else pair


_LEFT = {
    Decision.EVEN: "both are equally fast in {number}",
    Decision.DOUBTFUL: "nothing is decided in {number}, because {ratio.doubt}",
    Decision.FEW_SEEDS: "nothing is decided in {number}, because it takes three seeds",
    Decision.LIKE_REPEATS: "rows differ by no more than two runs of the same row in {number}",
    Decision.AMONG_MANY: "the difference in {number} can be chance in one of {ratio.among} comparisons",
    Decision.OPEN: "there is no clear difference in {number}{ratio.to_decide}",
}
"""Why settings have no winner."""


def _count(pairs: Sequence[tuple[SettingRows, tuple[str, str], Ratio]]) -> str:
    """Returns in how many settings each row wins and by how much, and why the others have no winner."""
    found: dict[str, list[tuple[SettingRows, Ratio]]] = {}
    for scope, (first, second), ratio in pairs:
        sides = (second, first) if ratio.decision is Decision.SMALLER else (first, second)
        won = "{} beats {} in {{number}}, by a factor of {{factors}}".format(*map(_the, sides))
        found.setdefault(won if ratio.decided else _LEFT[ratio.decision], []).append((scope, ratio))
    parts = []
    for words, settings in found.items():
        scopes, ratios = zip(*settings, strict=True)
        factors = [max(ratio.value, 1 / ratio.value) for ratio in ratios]
        ends = " to ".join(dict.fromkeys(f"{end(factors):.2f}" for end in (min, max)))
        last = max(ratios, key=lambda ratio: ratio.needed or math.inf)
        parts.append(words.format(number=_number(scopes), factors=ends, ratio=last))
    decided = any(ratio.decided for _, _, ratio in pairs)
    said = "Of {} settings, {}." if decided else "No clear winner in {} settings: {}."
    return said.format(len(pairs), "; ".join(parts))


def _number(scopes: Sequence[SettingRows]) -> str:
    """Returns the number of settings, and which it is if it is one."""
    return str(len(scopes)) if scopes[1:] else f"1 ({', '.join(scopes[0].words or ()) or 'the base setting'})"


def _nothing(findings: Findings) -> str:
    gate = findings.gate
    wrong = list(dict.fromkeys(each.row for each in gate.steps if not each.passed))
    reasons = [] if gate.agree else ["rows that should compute the same do not"]
    if wrong:
        reasons.append(f"{listed(wrong) if len(wrong) < 3 else f'{len(wrong)} rows'} took wrong steps")
    if reasons:
        return f"No row is called faster, because {' and '.join(reasons)}: see the gate."
    if why := next((each.withheld for each in findings.rows if each.withheld), ""):
        return f"No row is called faster, because {why.partition(';')[0]}."
    if gone := lost(findings):
        return f"No row is called faster, because {listed(list(gone))} failed."
    return "This experiment measured no two rows that can be compared by speed alone."


def _here(findings: Findings) -> str:
    if any(row.emulated for row in findings.rows) or any(each.link for each in findings.settings):
        return "emulated hosts"
    return "these machines" if on_a_cluster(findings) else "this machine"


def _the(name: str) -> str:
    return f"the {name}" if name in ("hub", "ring") else name


def _withheld(scope: SettingRows) -> list[str]:
    rows = (row for row in scope.rows if row.withheld is not None)
    return [scope.say(f"no speed is shown for {row.row}: {row.withheld}.") for row in rows]


def _failed(scope: SettingRows) -> list[str]:
    said = []
    for row in scope.rows:
        if row.failed is not None:
            fault = meets(row.row, scope.setting).fault
            after = "" if fault is None else f"after {fault.words} was lost at step {fault.step}, "
            rest = "; the other runs count" if row.partly else ""
            said.append(scope.say(f"{row.row} failed {after}in {row.failed.rstrip('.')}{rest}."))
    return said


def _to_target(scope: SettingRows) -> list[str]:
    """Returns which rows reach the target first, how much longer the others take, and which miss it."""
    job = scope.findings.job
    if job.target is None:
        return []
    goal = f"{job.title} {job.target:g}"
    found: dict[str, list[str]] = {}
    for row in scope.rows:
        number, seeds = row.number("seconds_to_target"), len(row.seeds)
        reached = 0 if number is None else number.seeds
        how = f"reached {goal} with only {reached} of {seeds} seeds" if reached else f"did not reach {goal}"
        if reached < seeds and not row.withheld:
            found.setdefault(how, []).append(row.row)
    missed = [scope.say(f"{listed(names)} {how}.") for how, names in found.items()]
    times = scope.times
    # By the geometric mean over the seeds, as the ratios compare them.
    logs = {name: fmean(math.log(v) if v else -math.inf for v in each.values) for name, each in times.items()}
    if not logs:
        return missed
    first, *others = sorted(logs, key=logs.__getitem__)
    behind = {name: scope.ratio("seconds_to_target", name, first) for name in others}
    if doubt := next((ratio.doubt for ratio in behind.values() if ratio and ratio.doubt), ""):
        return [
            scope.say(f"not decided: which row is first to reach {goal}, because {doubt}."),
            *missed,
        ]
    near = {name: ratio for name, ratio in behind.items() if ratio is None or not ratio.decided}
    later = [f"{name} takes {ratio} times as long" for name, ratio in behind.items() if name not in near]
    seconds = sorted(times[name].median for name in (first, *near))
    if near:
        even = all(ratio is None or ratio.decision is Decision.EVEN for ratio in near.values())
        alike = "equally fast" if even else "with no clear difference"
        ends = dict.fromkeys(f"{end:.2f}" for end in (seconds[0], seconds[-1]))
        span = f"in {' to '.join(ends)} s"
        begin = f"first to reach {goal} are {listed((first, *near))}, {alike}, {span}"
    else:
        begin = f"first to reach {goal} is {first}, in {seconds[0]:.2f} s"
    return [scope.say(f"{begin}{'; ' if later else ''}{', '.join(later)}."), *missed]


def _contest(scope: SettingRows, first: str, second: str, *rows: str) -> str:
    """Returns which of two rows processes more samples per second; empty without a common seed."""
    ratio, samples = scope.ratio(SPEED, *rows), scope.findings.job.samples
    mine, theirs = (scope.number(row, SPEED) for row in rows)
    if ratio is None or mine is None or theirs is None:
        return ""
    speeds = f"{mine.median:,.0f} {samples}/s against {theirs.median:,.0f}"
    return phrase("speed", ratio, first=first, second=second, speeds=speeds)


def _hub_against_ring(scope: SettingRows) -> list[str]:
    """Compares the ring with a synchronous hub row, which computes the same."""
    if not scope.hub_and_ring:
        return []
    hub, *others = scope.hubs
    ratios = {name: scope.ratio(SPEED, name, hub) for name in others}
    faster = [f"{name} is {each} times as fast" for name, each in _larger(ratios).items()]
    said = [
        _contest(scope, f"the hub ({hub})", "the ring", hub, "ring"),
        because(scope, hub),
        f"of the other hub rows, {listed(faster)} as {hub}." if faster else "",
    ]
    return [scope.say(each) for each in said if each]


def _larger(ratios: Mapping[str, Ratio | None]) -> dict[str, Ratio]:
    return {name: each for name, each in ratios.items() if each and each.decision is Decision.LARGER}


def _against_one_process(scope: SettingRows) -> list[str]:
    """Compares the workers with a single process."""
    ratios = {name: each for name in scope.parallel if (each := scope.ratio(SPEED, name, "local"))}
    if not ratios:
        return []
    name, ahead = chosen(list(ratios)), list(_larger(ratios))
    said = _contest(scope, name, "a single process with as many threads as each worker", name, "local")
    hindered = scope.setting.link is not None or scope.setting.straggler is not None
    if ahead and name not in ahead:
        said = f"{said[:-1]}; faster than the single process: {listed(ahead)}."
    elif not hindered and all(each.decision is Decision.SMALLER for each in ratios.values()):
        machines = "these machines have" if on_a_cluster(scope.findings) else "this machine has"
        why = f"the job is too small, or {machines} too few cores, to gain from several workers"
        said = f"{said[:-1]}: {why}."
    return [scope.say(said)]


def _asynchronous(scope: SettingRows) -> list[str]:
    """Returns what each asynchronous row gains in speed, and what that does to the time to the target."""
    said = []
    for name, base in scope.asynchronous:
        pace, (good, outcome) = scope.ratio(SPEED, name, base), _outcome(scope, name, base)
        if pace is not None and (outcome or pace.decided):
            joint = "and" if (pace.decision is Decision.LARGER) == good else "but"
            ends = f"{joint} {outcome}" if outcome else "and their results show no clear difference"
            said.append(scope.say(f"{phrase('pace', pace, first=name, second=base)}, {ends}."))
    return said


def _outcome(scope: SettingRows, name: str, base: str) -> tuple[bool, str]:
    """Returns whether the row has the better outcome, and the words for it; empty without a difference."""
    job, reached = scope.findings.job, [row in scope.times for row in (name, base)]
    goal = f"{job.title} {job.target:g}" if job.target is not None else ""
    mine, theirs = (scope.number(row, "final_metric") for row in (name, base))
    ends = f" (it ends at {mine.median:.3f}, {base} at {theirs.median:.3f})" if mine and theirs else ""
    if reached == [False, True]:
        return False, f"does not reach {goal} with every seed, while {base} does{ends}"
    if reached == [True, False]:
        return True, f"reaches {goal} with every seed, while {base} does not"
    time = scope.ratio("seconds_to_target", name, base) if all(reached) else None
    if time is not None and time.decided:
        return time.decision is Decision.SMALLER, phrase("time", time, goal=goal)
    metric = scope.ratio("final_metric", name, base)
    if metric is None or not metric.decided:
        return True, ""
    better = (metric.decision is Decision.LARGER) == job.rising
    return better, f"ends with a {'better' if better else 'worse'} result{ends}"


def _slowed(scope: SettingRows) -> list[str]:
    """Returns which rows the straggler slows and by how much.

    Speeds are means over all steps; median step times would hide rare delays.
    """
    if scope.setting.straggler is None:
        return []
    found = {here.row: scope.compared.ratio(SPEED, there, here) for here, there in scope.delayed}
    ratios = {name: each for name, each in found.items() if each}
    slowed = [f"{name} {each}" for name, each in _larger(ratios).items()]
    spared = [n for n, each in ratios.items() if each.decision in (Decision.EVEN, Decision.SMALLER)]
    unsure = [
        f"{n} {each}" for n, each in ratios.items() if not each.decided and each.decision != Decision.EVEN
    ]
    slow = straggler(scope.setting.straggler)
    effects = [f"{slow} makes steps of {listed(slowed)} times as long"] if slowed else []
    start = "but not of" if slowed else f"{slow} does not slow"
    effects += [f"{start} {listed(spared, 'or')}"] if spared else []
    doubt = f"with and without {slow}, steps show no clear difference: {listed(unsure)} times as long"
    said = [", ".join(effects), doubt if unsure else ""]
    return [scope.say(f"{each}.", besides=slow) for each in said if each]


def _survived(scope: SettingRows) -> list[str]:
    """Returns which rows survived the fault, how long they paused, and what they lost."""
    fault = scope.setting.fault
    rows = [
        row.row
        for row in scope.rows
        if row.failed is None and row.number("final_metric") and meets(row.row, scope.setting).fault
    ]
    if fault is None or not rows:
        return []
    left = "without" if fault.victim == "worker" else "after the loss of"
    said = [scope.say(f"{listed(rows)} finished {left} {fault.words}.")]
    for name in rows:
        pause, lost = scope.number(name, "pause_seconds"), scope.number(name, "lost_steps")
        if pause is not None and lost is not None:
            said.append(
                scope.say(f"{name} paused for {pause.median:.2f} s and repeated {lost.median:g} steps.")
            )
    return said


def crossing(found: Crossover) -> str:
    """Returns the number of servers from which the hub wins: measured, predicted, and by bytes alone."""
    faster, undecided = "the hub is faster than the ring", ""
    if found.undecided:
        servers = "server" if found.undecided == [1] else "servers"
        undecided = f"not decided with {listed(list(map(str, found.undecided)))} {servers}"
    if undecided and found.measured is None:
        measured = f"whether {faster} is {undecided}"
    else:
        measured = f"{faster} {with_servers(found.measured)}"
        measured += f", and it is {undecided}" if undecided else ""
    predicted = f"predicted: {with_servers(found.predicted)}" if found.calibrated else "no prediction"
    return f"{measured}; {predicted}; by bytes alone ({found.formula}): {with_servers(found.by_bytes)}."
