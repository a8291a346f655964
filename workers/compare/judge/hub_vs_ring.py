"""Hub against ring and why, and what a row gains or loses by not waiting."""

from __future__ import annotations

from collections.abc import Sequence

from hubring.workers.compare.cost.model.crossing import FORMULA, servers_needed
from hubring.workers.compare.cost.model.exchange_terms import goodput
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.setting_text import Scope, listed

BEYOND = 1.25
"""So many times its line rate's time an exchange takes that something else than links decides."""


def contest(first: str, second: str, scope: Scope, rows: tuple[str, str]) -> str:
    """Who processes more samples a second, as a sentence.

    Args:
        first: What the first row is called.
        second: What the second is called.
        scope: Where both ran.
        rows: Their names; both have a speed.
    """
    ratio = scope.ratio("samples_per_second", rows[0], rows[1])
    mine, theirs = (scope.number(row, "samples_per_second") for row in rows)
    assert ratio is not None
    assert mine is not None
    assert theirs is not None
    samples = scope.findings.job.samples
    speeds = f"{mine.median:,.0f} {samples}/s against {theirs.median:,.0f}"
    if _seeds(scope, rows[0]) == 1:
        return f"{first} was {ratio.value:.2f} times as fast as {second} in this one run: {speeds}."
    if ratio.even:
        return f"{first} is even with {second}: {speeds}."
    if not ratio.decided:
        return f"{first} is not told apart from {second}: {speeds}, {ratio.factor}."
    if ratio.value > 1:
        return f"{first} beats {second}: {speeds}, {ratio.factor}."
    turned = scope.ratio("samples_per_second", rows[1], rows[0])
    assert turned is not None
    return f"{first} loses to {second}: {speeds}, {turned.factor}."


def hub_against_ring(scope: Scope) -> list[str]:
    """The like with the like: a synchronous hub row, which computes what the ring computes."""
    raced = [row.row for row in scope.rows if row.synchronous and row.number("samples_per_second")]
    hubs = [name for name in raced if name.startswith("hub-")]
    # With a loss, the wait until it was noticed is in the speed.
    if "ring" not in raced or not hubs or scope.setting.fault:
        return []
    hub = chosen(hubs)
    said = contest(f"the hub ({hub})", "the ring", scope, (hub, "ring"))
    because = _because(scope, hub)
    faster = _ahead(scope, hub, hubs)
    return [scope.say(each) for each in (said, because, faster) if each]


def chosen(rows: Sequence[str]) -> str:
    """Which of the rows stands for all: the one asked for first, or hub-bsp.

    Not the fastest, which would be picked by the numbers that then speak for it.
    """
    return "hub-bsp" if "hub-bsp" in rows else rows[0]


def _ahead(scope: Scope, hub: str, hubs: Sequence[str]) -> str:
    """Which other rows of the hub are faster than the one that stood for it; empty: none."""
    ratios = {name: scope.ratio("samples_per_second", name, hub) for name in hubs if name != hub}
    faster = [f"{name} is {each} times as fast" for name, each in ratios.items() if each and each.more]
    return f"of the hub's other ways, {listed(faster)} as {hub}." if faster else ""


def on_a_cluster(findings: Findings) -> bool:
    """Whether several machines took part."""
    return len(findings.machine.get("hosts", ())) > 1


def _because(scope: Scope, hub: str) -> str:
    """Why it won or lost, by what points the way it went; empty where nothing does or nobody won."""
    ratio = scope.ratio("samples_per_second", hub, "ring")
    if ratio is None or not ratio.decided or _seeds(scope, hub) == 1:
        return ""
    wins = ratio.value > 1
    reasons = [*_waits(scope, hub, wins), *_wires(scope, wins), *_latencies(scope, wins)]
    # A straggler slows whoever waits for it, and of cores the hub has never more to itself than the ring.
    if not wins and not scope.setting.straggler and not on_a_cluster(scope.findings):
        beyond = _beyond_wires(scope, hub) if scope.setting.link else _cores(scope)
        reasons += [f"yet {each}" if reasons and scope.setting.link else each for each in beyond]
    return f"the hub {'wins' if wins else 'loses'} here, because {'; '.join(reasons)}." if reasons else ""


def _seeds(scope: Scope, row: str) -> int:
    """With how many seeds a row ran; one tells nothing from chance."""
    number = scope.number(row, "samples_per_second")
    return 0 if number is None else len(number.values)


def _waits(scope: Scope, hub: str, wins: bool) -> list[str]:
    """What a step waited for either exchange."""
    mine, theirs = scope.number(hub, "exposed_ms"), scope.number("ring", "exposed_ms")
    ratio = scope.ratio("exposed_ms", hub, "ring")
    if mine is None or theirs is None or ratio is None or not ratio.decided or (ratio.value < 1) != wins:
        return []
    return [
        f"its steps wait {mine.median:.2f} ms for the exchange, which hides behind no computing,"
        f" and the ring's {theirs.median:.2f} ms"
    ]


def _wires(scope: Scope, wins: bool) -> list[str]:
    """What a link carries, by the formula."""
    n, k, link = scope.setting.workers, scope.setting.servers, scope.setting.link
    hub, ring = max(1.0, n / k), 2 * (n - 1) / n
    if not link or not link.rate or hub == ring or (hub < ring) != wins:
        return []
    needed = servers_needed(n)
    told = "it never wins" if needed is None else f"it wins from {needed} servers on"
    return [
        f"{n} workers on {k} server{'' if k == 1 else 's'} move {hub:.3g} times the model each way over the"
        f" busiest link, and the ring {ring:.3g} times; by bytes alone {told} ({FORMULA})"
    ]


def _latencies(scope: Scope, wins: bool) -> list[str]:
    """How often an exchange waits for a link's latency: a hub's there and back, a ring's at every hop."""
    hops, link = 2 * (scope.setting.workers - 1), scope.setting.link
    if not wins or not link or not link.latency or hops <= 2:
        return []
    once = 1e3 * link.latency
    return [
        f"the links' latency is in its exchange twice, {2 * once:g} ms, and in the ring's {hops} times,"
        f" {hops * once:g} ms"
    ]


def _beyond_wires(scope: Scope, hub: str) -> list[str]:
    """Whether the links are what the hub waits for: one machine that plays all hosts has its own limit."""
    n, k, link = scope.setting.workers, scope.setting.servers, scope.setting.link
    sent, exposed = scope.number(hub, "bytes_sent_per_step"), scope.number(hub, "exposed_ms")
    if not link or not link.rate or link.latency or sent is None or exposed is None:
        return []
    needed = 1e3 * max(1.0, n / k) * sent.median / goodput(Link(rate=link.rate))
    if exposed.median < BEYOND * needed:
        return []
    return [
        f"at line rate its bytes take {needed:.0f} ms: what holds the hub up here is less its links than the"
        f" {scope.findings.machine['cores']} cores on which {n + k} processes move the bytes of all of them"
    ]


def _cores(scope: Scope) -> list[str]:
    """Without a link nothing decides but processors and copies; more processes than cores are no help."""
    n, k, cores = scope.setting.workers, scope.setting.servers, scope.findings.machine["cores"]
    if n + k <= cores:
        return []
    return [
        f"on one machine copies and cores decide, not wires: {n + k} busy processes share {cores} cores,"
        f" where the ring has {n}"
    ]


def asynchronous(scope: Scope) -> list[str]:
    """What each row that does not wait gains by step, and what becomes of that on the way to the target."""
    base = next((name for name in ("hub-bsp", "ring", "hub-aggregate") if name in scope.names), None)
    if base is None or scope.setting.workers < 2 or scope.setting.fault:
        return []
    rows = [row.row for row in scope.rows if not row.synchronous]
    return [scope.say(said) for name in rows if (said := _gain(scope, name, base))]


def _gain(scope: Scope, name: str, base: str) -> str:
    pace = scope.ratio("samples_per_second", name, base)
    if pace is None:
        return ""
    faster = pace.more
    if faster:
        step = f"{name} goes through its samples {pace} times as fast as {base}"
    elif pace.decided:
        step = f"{name} goes through its samples more slowly than {base}, at {pace} of its pace"
    elif pace.even:
        step = f"{name} is even with {base} in samples a second"
    else:
        step = f"{name} is not told apart from {base} in samples a second, at {pace} of its pace"
    good, outcome = _outcome(scope, name, base)
    if not outcome:
        return ""
    joint = ("and" if good else "yet") if faster else ("yet" if good else "and")
    return f"{step}, {joint} {outcome}."


def _outcome(scope: Scope, name: str, base: str) -> tuple[bool, str]:
    """Whether that paid, and the words for it; empty where there is nothing to say."""
    job = scope.findings.job
    goal = f"{job.title} {job.target:g}" if job.target is not None else ""
    mine, theirs = (scope.number(row, "seconds_to_target") for row in (name, base))
    reached = [number is not None and number.complete for number in (mine, theirs)]
    if goal and reached == [False, True]:
        return False, f"does not reach {goal} with every seed, as {base} does{_finals(scope, name, base)}"
    if goal and reached == [True, False]:
        return True, f"reaches {goal} with every seed, as {base} does not"
    ratio = scope.ratio("seconds_to_target", name, base) if all(reached) else None
    if ratio is not None and ratio.decided:
        sooner = ratio.value < 1
        times = scope.ratio("seconds_to_target", base, name) if sooner else ratio
        return sooner, f"reaches {goal} {times} times {'sooner' if sooner else 'later'}"
    return _final(scope, name, base)


def _final(scope: Scope, name: str, base: str) -> tuple[bool, str]:
    """Where the two ended, if that is not even."""
    ratio = scope.ratio("final_metric", name, base)
    if ratio is None or not ratio.decided:
        return True, ""
    better = (ratio.value > 1) == scope.findings.job.rising
    return better, f"ends {'better' if better else 'worse'}{_finals(scope, name, base)}"


def _finals(scope: Scope, name: str, base: str) -> str:
    mine, theirs = (scope.number(row, "final_metric") for row in (name, base))
    if mine is None or theirs is None:
        return ""
    return f" (it ends at {mine.median:.3f}, {base} at {theirs.median:.3f})"
