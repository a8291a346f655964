"""Hub against ring and the reasons, and what a row gains or loses without waiting."""

from __future__ import annotations

from collections.abc import Sequence

from hubring.workers.compare.cost.model.crossing import FORMULA, servers_needed
from hubring.workers.compare.cost.model.exchange_terms import goodput
from hubring.workers.compare.experiment.row import EVERY
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.ratio import Ratio
from hubring.workers.compare.result.setting_text import Scope, listed

BEYOND = 1.25
"""Ratio of exchange time to line-rate time above which something else than links is the limit."""


def contest(first: str, second: str, scope: Scope, rows: tuple[str, str]) -> str:
    """Returns a sentence on which of two rows processes more samples per second.

    Args:
        first: The first row in words.
        second: The second row in words.
        scope: The setting of both.
        rows: Names of the rows; both have a speed.
    """
    ratio = scope.ratio("samples_per_second", rows[0], rows[1])
    mine, theirs = (scope.number(row, "samples_per_second") for row in rows)
    assert ratio is not None
    assert mine is not None
    assert theirs is not None
    samples = scope.findings.job.samples
    speeds = f"{mine.median:,.0f} {samples}/s against {theirs.median:,.0f}"
    if ratio.doubt:
        return f"not decided on this machine: {first} against {second}, {speeds}, because {ratio.doubt}."
    if ratio.even:
        return f"{first} is as fast as {second}: {speeds}."
    if not ratio.decided:
        close = f"no clear difference between {first} and {second}: {speeds}, {ratio.factor}"
        return f"{close}{_to_decide(ratio)}."
    if ratio.value > 1:
        return f"{first} beats {second}: {speeds}, {ratio.factor}."
    return f"{first} loses to {second}: {speeds}, {ratio.inverse.factor}."


def _to_decide(ratio: Ratio) -> str:
    """Returns what would decide between two rows, as the end of a sentence."""
    if ratio.spread is None:
        return "; a single run decides nothing, so use three seeds or more"
    if ratio.like_repeats:
        return f"; two runs of the same row differ as much on this machine ({ratio.least:.2f})"
    return "" if ratio.needed is None else f"; about {ratio.needed} seeds would decide it"


def hub_against_ring(scope: Scope) -> list[str]:
    """Compares the ring with a synchronous hub row, which computes the same."""
    raced = racing(scope)
    hubs = [name for name in raced if name.startswith("hub-")]
    # After a fault, the speed includes the time to detect it.
    if "ring" not in raced or not hubs or scope.setting.fault:
        return []
    hub = chosen(hubs)
    result = contest(f"the hub ({hub})", "the ring", scope, (hub, "ring"))
    because = _because(scope, hub)
    faster = _faster_hubs(scope, hub, hubs)
    return [scope.say(each) for each in (result, because, faster) if each]


def racing(scope: Scope) -> list[str]:
    """Returns the rows with a speed that should compute the same, so that speed alone decides."""
    return [
        row.row for row in scope.rows if row.synchronous and row.exact and row.number("samples_per_second")
    ]


def chosen(rows: Sequence[str]) -> str:
    """Returns the row that represents all: hub-bsp, or the first of the experiment.

    Not the fastest row: choosing by the numbers would bias the comparison.
    """
    return "hub-bsp" if "hub-bsp" in rows else rows[0]


def _faster_hubs(scope: Scope, hub: str, hubs: Sequence[str]) -> str:
    """Returns which other hub rows are faster than this one; empty: none."""
    ratios = {name: scope.ratio("samples_per_second", name, hub) for name in hubs if name != hub}
    faster = [f"{name} is {each} times as fast" for name, each in ratios.items() if each and each.more]
    return f"of the other hub rows, {listed(faster)} as {hub}." if faster else ""


def on_a_cluster(findings: Findings) -> bool:
    """Whether several machines took part."""
    return len(findings.machine.get("hosts", ())) > 1


def _because(scope: Scope, hub: str) -> str:
    """Returns the reasons that fit the result; empty if there are none or the result is not decided."""
    ratio = scope.ratio("samples_per_second", hub, "ring")
    if ratio is None or not ratio.decided:
        return ""
    wins = ratio.value > 1
    # A hub that is colocated, or has standbys, has another number of servers than the setting.
    counted = EVERY[hub].hosts(scope.setting)[1] == scope.setting.servers
    wires = _wires(scope, wins) if counted else []
    reasons = [*_waits(scope, hub, wins), *wires, *_latencies(scope, hub, wins)]
    # A straggler slows every row that waits for it. A hub never has more of the cores than the ring.
    if counted and not wins and not scope.setting.straggler and not on_a_cluster(scope.findings):
        beyond = _beyond_wires(scope, hub) if scope.setting.link else _cores(scope)
        reasons += [f"but {each}" if reasons and scope.setting.link else each for each in beyond]
    return f"the hub {'wins' if wins else 'loses'} here because {'; '.join(reasons)}." if reasons else ""


def _waits(scope: Scope, hub: str, wins: bool) -> list[str]:
    """Compares the exposed exchange times."""
    mine, theirs = scope.number(hub, "exposed_ms"), scope.number("ring", "exposed_ms")
    ratio = scope.ratio("exposed_ms", hub, "ring")
    if mine is None or theirs is None or ratio is None or not ratio.decided or (ratio.value < 1) != wins:
        return []
    return [
        f"its steps wait {mine.median:.2f} ms for exchange that does not overlap with compute,"
        f" the ring's steps {theirs.median:.2f} ms"
    ]


def _wires(scope: Scope, wins: bool) -> list[str]:
    """Compares the bytes on the busiest links, by the formula."""
    n, k, link = scope.setting.workers, scope.setting.servers, scope.setting.link
    hub, ring = max(1.0, n / k), 2 * (n - 1) / n
    if not link or not link.rate or hub == ring or (hub < ring) != wins:
        return []
    needed = servers_needed(n)
    winning = "never wins" if needed is None else f"wins with {needed} or more servers"
    return [
        f"with {n} workers and {k} server{'' if k == 1 else 's'}, its busiest link carries {hub:.3g} times"
        f" the model each way, the ring's {ring:.3g} times; by bytes alone the hub {winning} ({FORMULA})"
    ]


def _latencies(scope: Scope, hub: str, wins: bool) -> list[str]:
    """Compares how often an exchange waits for a link's latency: to a shard and back, or at every hop.

    A shard replies once its standby has acknowledged the step. At each hop of a ring Gloo sends once its
    receiver has said that it waits. Between three and more ranks other bytes travel meanwhile; if these take
    longer, latency is no reason.
    """
    around, link = 4 * (scope.setting.workers - 1), scope.setting.link
    times = 4 if EVERY[hub].has_standbys else 2
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


def _beyond_wires(scope: Scope, hub: str) -> list[str]:
    """Returns whether the hub is limited by the machine that emulates all hosts, rather than by links."""
    n, k, link = scope.setting.workers, scope.setting.servers, scope.setting.link
    sent, exposed = scope.number(hub, "bytes_sent_per_step"), scope.number(hub, "exposed_ms")
    if not link or not link.rate or link.latency or sent is None or exposed is None:
        return []
    needed = 1e3 * max(1.0, n / k) * sent.median / goodput(Link(rate=link.rate))
    if exposed.median < BEYOND * needed:
        return []
    return [
        f"at line rate its bytes take {needed:.0f} ms, so it is limited less by its links than by the"
        f" {scope.findings.machine['cores']} cores on which {n + k} processes move the bytes of all links"
    ]


def _cores(scope: Scope) -> list[str]:
    """Without links only processors and copies matter, and more processes than cores slow the hub."""
    n, k, cores = scope.setting.workers, scope.setting.servers, scope.findings.machine["cores"]
    if n + k <= cores:
        return []
    return [
        f"on one machine, cores and copies are the limit, not links: its {n + k} busy processes share {cores}"
        f" cores, and the ring has {n}"
    ]


def asynchronous(scope: Scope) -> list[str]:
    """Returns what each asynchronous row gains in speed, and what that does to the time to the target."""
    base = next((name for name in ("hub-bsp", "ring", "hub-aggregate") if name in scope.names), None)
    if base is None or scope.setting.workers < 2 or scope.setting.fault:
        return []
    rows = [row.row for row in scope.rows if not (row.synchronous and row.exact)]
    return [scope.say(text) for name in rows if (text := _gain(scope, name, base))]


def _gain(scope: Scope, name: str, base: str) -> str:
    pace = scope.ratio("samples_per_second", name, base)
    if pace is None:
        return ""
    faster = pace.more
    if faster:
        step = f"{name} processes samples {pace} times as fast as {base}"
    elif pace.decided:
        step = f"{name} processes samples more slowly than {base}, at {pace} of its speed"
    elif pace.even:
        step = f"{name} is as fast as {base} in samples per second"
    elif pace.doubt:
        step = f"it is not decided whether {name} or {base} processes more samples per second"
    else:
        step = f"{name} and {base} show no clear difference in samples per second (a ratio of {pace})"
    good, outcome = _outcome(scope, name, base)
    if not outcome:
        return ""
    joint = ("and" if good else "but") if faster else ("but" if good else "and")
    return f"{step}, {joint} {outcome}."


def _outcome(scope: Scope, name: str, base: str) -> tuple[bool, str]:
    """Returns whether the row has the better outcome, and the words for it; empty without a difference."""
    job = scope.findings.job
    goal = f"{job.title} {job.target:g}" if job.target is not None else ""
    mine, theirs = (scope.number(row, "seconds_to_target") for row in (name, base))
    reached = [number is not None and number.complete for number in (mine, theirs)]
    if goal and reached == [False, True]:
        return False, f"does not reach {goal} with every seed, while {base} does{_finals(scope, name, base)}"
    if goal and reached == [True, False]:
        return True, f"reaches {goal} with every seed, while {base} does not"
    ratio = scope.ratio("seconds_to_target", name, base) if all(reached) else None
    if ratio is not None and ratio.decided:
        sooner = ratio.value < 1
        times = scope.ratio("seconds_to_target", base, name) if sooner else ratio
        paid = f"is {times} times as fast to {goal}" if sooner else f"takes {times} times as long to {goal}"
        return sooner, paid
    return _final(scope, name, base)


def _final(scope: Scope, name: str, base: str) -> tuple[bool, str]:
    """Compares the final metrics; empty if they are not clearly different."""
    ratio = scope.ratio("final_metric", name, base)
    if ratio is None or not ratio.decided:
        return True, ""
    better = (ratio.value > 1) == scope.findings.job.rising
    return better, f"ends with a {'better' if better else 'worse'} result{_finals(scope, name, base)}"


def _finals(scope: Scope, name: str, base: str) -> str:
    mine, theirs = (scope.number(row, "final_metric") for row in (name, base))
    if mine is None or theirs is None:
        return ""
    return f" (it ends at {mine.median:.3f}, {base} at {theirs.median:.3f})"
