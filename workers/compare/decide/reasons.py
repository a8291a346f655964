"""Why the hub wins or loses, as far as the numbers show, from how many servers on, and what limits trust."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from hubring.workers.compare.decide.decision import SPEED, Comparisons, SettingRows, script_changes
from hubring.workers.compare.decide.ratio import Decision
from hubring.workers.compare.findings import Crossover, Findings, Gate
from hubring.workers.compare.plan.row import EVERY
from hubring.workers.compare.plan.setting import grouped, listed, without_servers
from hubring.workers.compare.predict.exchange_terms import FORMULA, goodput, servers_needed
from hubring.workers.compare.predict.score import Score

BEYOND = 1.25
"""Ratio of exchange time to line-rate time above which something else than links is the limit."""


DRIFT, FEWEST_STEPS = 1.25, 20
"""Ratio of the median step in the last third of a run to that in its first third from which on steps drifted,
and the fewest steps of a third."""


def on_a_cluster(findings: Findings) -> bool:
    """Whether several machines took part."""
    return len(findings.machine.get("hosts", ())) > 1


def because(scope: SettingRows, hub: str) -> str:
    """Returns the reasons that fit the result; empty if there are none or the result is not decided."""
    ratio = scope.ratio(SPEED, hub, "ring")
    if ratio is None or not ratio.decided:
        return ""
    wins = ratio.value > 1
    # A hub that is colocated, or has standbys, has another number of servers than the setting.
    way = EVERY[hub]
    counted = not way.local and way.hosts(scope.setting)[1] == scope.setting.servers
    wires = _wires(scope, wins) if counted else []
    reasons = [*_waits(scope, hub, wins), *wires, *_latencies(scope, hub, wins)]
    # A straggler slows every row that waits for it. A hub never has more of the cores than the ring.
    if counted and not wins and not scope.setting.straggler and not on_a_cluster(scope.findings):
        beyond = _beyond_wires(scope, hub) if scope.setting.link else _cores(scope)
        reasons += [f"but {each}" if reasons and scope.setting.link else each for each in beyond]
    return f"the hub {'wins' if wins else 'loses'} here because {'; '.join(reasons)}." if reasons else ""


def _waits(scope: SettingRows, hub: str, wins: bool) -> list[str]:
    """Compares the exposed exchange times."""
    mine, theirs = scope.number(hub, "exposed_ms"), scope.number("ring", "exposed_ms")
    ratio = scope.ratio("exposed_ms", hub, "ring")
    if mine is None or theirs is None or ratio is None or not ratio.decided or (ratio.value < 1) != wins:
        return []
    return [
        f"its steps wait {mine.median:.2f} ms for exchange that does not overlap with compute,"
        f" the ring's steps {theirs.median:.2f} ms"
    ]


def _wires(scope: SettingRows, wins: bool) -> list[str]:
    """Compares the bytes on the busiest links, by the formula."""
    n, k, sharing = scope.setting.workers, scope.setting.servers, scope.setting.sharing
    link = scope.setting.link
    if not link or not link.rate or sharing == n:  # then no link is in the ring
        return []
    hub, ring = max(sharing, n / k), 2 * (n - 1) / n
    if hub == ring or (hub < ring) != wins:
        return []
    needed = servers_needed(n, sharing)
    winning = "never wins" if needed is None else f"wins with {needed} or more servers ({FORMULA})"
    return [
        f"with {n} workers and {k} server{'' if k == 1 else 's'}, its busiest link carries {hub:.3g} times"
        f" the model each way, the ring's {ring:.3g} times; by bytes alone the hub {winning}"
    ]


def _latencies(scope: SettingRows, hub: str, wins: bool) -> list[str]:
    """Compares how often an exchange waits for a link's latency: to a shard and back, or at every hop.

    A shard replies once its standby has acknowledged the step. At each hop of a ring Gloo sends once its
    receiver has said that it waits. Between three and more ranks other bytes travel meanwhile; if these take
    longer, latency is no reason.
    """
    around, link = 4 * (scope.setting.workers - 1), scope.setting.link
    times = 4 if EVERY[hub].standbys else 2
    if not wins or not link or not link.latency or around <= times:
        return []
    once, sent = 1e3 * link.latency, scope.number("ring", "bytes_sent_per_step")
    moving = 0.0 if sent is None else 1e3 * sent.median / goodput(link)
    if scope.setting.workers > 2 and moving >= around * once:
        return []
    return [
        f"its exchange includes the link latency {times} times ({times * once:g} ms), the ring's"
        f" at least {around} times ({around * once:g} ms)"
    ]


def _beyond_wires(scope: SettingRows, hub: str) -> list[str]:
    """Returns whether the hub is limited by the machine that emulates all hosts, rather than by links."""
    n, k, link = scope.setting.workers, scope.setting.servers, scope.setting.link
    sent, exposed = scope.number(hub, "bytes_sent_per_step"), scope.number(hub, "exposed_ms")
    if not link or not link.rate or link.latency or sent is None or exposed is None:
        return []
    needed = 1e3 * max(scope.setting.sharing, n / k) * sent.median / goodput(link)
    if exposed.median < BEYOND * needed:
        return []
    return [
        f"at line rate its bytes take {needed:.0f} ms, so it is limited less by its links than by the"
        f" {scope.findings.machine['cores']} cores on which {n + k} processes move the bytes of all links"
    ]


def _cores(scope: SettingRows) -> list[str]:
    """Without links only processors and copies matter, and more processes than cores slow the hub."""
    n, k, cores = scope.setting.workers, scope.setting.servers, scope.findings.machine["cores"]
    if n + k <= cores:
        return []
    return [
        f"on one machine, cores and copies are the limit, not links: its {n + k} busy processes share {cores}"
        f" cores, and the ring has {n}"
    ]


WON = {Decision.LARGER: True, Decision.SMALLER: False, Decision.EVEN: False}
"""Whether the hub is faster than the ring, by what their ratio decides."""


def crossovers(compared: Comparisons, model: Score | None) -> list[Crossover]:
    """Returns where the hub begins to win, for settings with a link that differ only in servers.

    Speeds are samples per second, as in the rest of the verdict, so the two cannot contradict each other.

    Args:
        compared: The comparisons. A setting counts only if they have hub-bsp and the ring.
        model: The calibrated model; None: nothing is predicted.
    """
    calibrated = model is not None and {"ring", "hub-bsp"} <= model.calibrated
    scopes, found = {scope.setting: scope for scope in compared.scopes}, []
    for first, *others in grouped(scopes, "servers"):
        raced = [scopes[each] for each in (first, *others) if scopes[each].pair == ("hub-bsp", "ring")]
        ratios = {scope.setting.servers: scope.ratio(SPEED, "hub-bsp", "ring") for scope in raced}
        wins = {servers: WON.get(ratio.decision) for servers, ratio in ratios.items() if ratio is not None}
        if len(wins) < 2 or first.link is None:
            continue
        measured, undecided = _from_on(wins)
        found.append(
            Crossover(
                setting=without_servers(first.key),
                tried=list(wins),
                measured=measured,
                undecided=undecided,
                predicted=model.crossover(first) if model is not None and calibrated else None,
                calibrated=calibrated,
                by_bytes=servers_needed(first.workers, first.sharing),
                formula=FORMULA,
            )
        )
    return found


def _from_on(wins: Mapping[int, bool | None]) -> tuple[int | None, list[int]]:
    """Returns where it begins to win, by all numbers of servers that were tried.

    Args:
        wins: Whether a number of servers wins, None if that is not decided, in ascending order.

    Returns:
        The fewest servers from which all win, and the numbers with which that can be fewer or none.
    """
    first, undecided = None, list[int]()
    for servers, won in reversed(list(wins.items())):
        if won is False:
            break
        if won is None:
            undecided.insert(0, servers)
        elif not undecided:
            first = servers
    return first, undecided


def caveats(findings: Findings) -> list[str]:
    """Returns what limits the reliability of the results."""
    asked, gate, changed = findings.asked, findings.gate, script_changes(findings)
    apart = any(pair.limit and not pair.passed for pair in gate.pairs)
    replayed = bool(gate.steps) and all(each.passed and each.steps == each.judged for each in gate.steps)
    advice = [*(pair.advice for pair in gate.pairs), *(each.advice for each in gate.steps)]
    texts = {
        "All rows used the job's learning rate times their number of workers (lr = linear).": (
            asked.lr == "linear"
        ),
        "Asynchronous rows used the job's learning rate divided by their number of workers"
        " (lr = per-worker).": asked.lr == "per-worker",
        "Rows that should agree do not. One of them is wrong, or this job amplifies rounding, as wide"
        " layers and high learning rates can. If it is rounding, allow more with ps-compare report FOLDER"
        f" --tolerance {10 * gate.tolerance:g}.": apart,
        "Each step by itself is what one process makes of the workers' gradients. So rows that differ"
        " differ by rounding, or in the samples and random numbers of their gradients.": apart and replayed,
        **{text: bool(text) for text in (*advice, *_unjudged(gate), _drifts(findings))},
        f"{changed}. To run one version everywhere, use another --out.": bool(changed),
        "Workers slept for part of every step, so the times are those of an emulated machine.": any(
            row.emulated for row in findings.rows
        ),
        **dict.fromkeys(findings.noise.said, not findings.noise.quiet),
        "GPUs were not watched: other programs on them, or lower clock rates, would not show here.": (
            findings.noise.gpus
        ),
    }
    return [text for text, holds in texts.items() if holds]


def _drifts(findings: Findings) -> str:
    """Returns which runs' steps became longer or shorter, except where a reason is known."""
    rows, found = {(each.setting, each.row): each for each in findings.rows}, []
    for curve in findings.curves:
        row, fault = rows[curve.setting, curve.row], findings.setting(curve.setting).fault
        times = [after.seconds - before.seconds for before, after in pairwise(curve.loss)]
        third = len(times) // 3
        if third < FEWEST_STEPS or row.withheld or row.disturbed or fault:
            continue
        drift = median(times[-third:]) / median(times[:third])
        if not 1 / DRIFT < drift < DRIFT:
            found.append(f"{drift:.2f} in {curve.row} (seed {curve.seed}, {curve.setting})")
    said = "Step times drifted within runs. A step of the last third took, as a multiple of one of the first:"
    return f"{said} {', '.join(found)}." if found else ""


def _unjudged(gate: Gate) -> list[str]:
    """Returns which rows' updates the gate could not replay, by reason."""
    rows: dict[str, dict[str, None]] = {}
    for each in gate.steps:
        if each.unjudged:
            rows.setdefault(each.unjudged, {})[each.row] = None
    return [f"The updates of {listed(list(names))} were not replayed: {why}." for why, names in rows.items()]
