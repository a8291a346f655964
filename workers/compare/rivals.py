"""Rivals: hub against ring and why, and what a row gains or loses by not waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.compare.cost.crossing import FORMULA, servers_needed
from workers.compare.cost.way import goodput
from workers.compare.scope import Scope
from workers.compare.setting import Link

Results = Mapping[str, Any]

BEYOND = 1.25
"""So many times its line rate's time an exchange takes that something else than links decides."""


def contest(first: str, second: str, scope: Scope, rows: tuple[str, str], results: Results) -> str:
    """Who processes more samples a second, as a sentence.

    Args:
        first: What the first row is called.
        second: What the second is called.
        scope: Where both ran.
        rows: Their names; both have a speed.
        results: Name the samples.
    """
    ratio = scope.ratio("samples_per_second", rows[0], rows[1])
    mine, theirs = (scope.number(row, "samples_per_second") for row in rows)
    assert ratio is not None
    assert mine is not None
    assert theirs is not None
    samples = results["job"]["samples"]
    speeds = f"{mine['median']:,.0f} {samples}/s against {theirs['median']:,.0f}"
    if not ratio.decided:
        return f"{first} is even with {second}: {speeds}."
    if ratio.value > 1:
        return f"{first} beats {second}: {speeds}, a factor of {ratio}."
    turned = scope.ratio("samples_per_second", rows[1], rows[0])
    return f"{first} loses to {second}: {speeds}, a factor of {turned}."


def hub_against_ring(scope: Scope, results: Results) -> list[str]:
    """The like with the like: synchronous hub rows, which compute what the ring computes."""
    speeds = {
        row["row"]: row["numbers"]["samples_per_second"]["median"]
        for row in scope.rows
        if row["synchronous"] and row["numbers"]["samples_per_second"] and row["row"] != "local"
    }
    hubs = [name for name in speeds if name.startswith("hub-")]
    # With a loss, the wait until it was noticed is in the speed.
    if "ring" not in speeds or not hubs or scope.setting["fault"]:
        return []
    hub = max(hubs, key=lambda name: float(speeds[name]))
    said = contest(f"the hub ({hub})", "the ring", scope, (hub, "ring"), results)
    ratio = scope.ratio("samples_per_second", hub, "ring")
    if ratio is None or not ratio.decided:
        return [scope.say(said)]
    wins = ratio.value > 1
    reasons = [*_waits(scope, hub), *_where(scope, results, hub, wins)]
    because = f"the hub {'wins' if wins else 'loses'} here, because {'; '.join(reasons)}."
    return [scope.say(said), *([scope.say(because)] if reasons else [])]


def on_a_cluster(results: Results) -> bool:
    """Whether several machines took part."""
    return len(results["machine"].get("hosts", ())) > 1


def _where(scope: Scope, results: Results, hub: str, wins: bool) -> list[str]:
    """What the way of the bytes had to do with it, where that is known."""
    if scope.setting["link"]:
        return [_wires(scope), *_beyond_wires(scope, results, hub)]
    return [] if on_a_cluster(results) else [_cores(scope, results, wins)]


def _waits(scope: Scope, hub: str) -> list[str]:
    """What a step waited for either exchange."""
    mine, theirs = scope.number(hub, "exposed_ms"), scope.number("ring", "exposed_ms")
    if mine is None or theirs is None:
        return []
    return [
        f"its steps wait {mine['median']:.2f} ms for the exchange, which hides behind no computing,"
        f" and the ring's {theirs['median']:.2f} ms"
    ]


def _wires(scope: Scope) -> str:
    """What a link carries, by the formula."""
    n, k = scope.setting["workers"], scope.setting["servers"]
    hub, ring = max(1.0, n / k), 2 * (n - 1) / n
    needed = servers_needed(n)
    wins = "it never wins" if needed is None else f"it wins from {needed} servers on"
    return (
        f"{n} workers on {k} server{'' if k == 1 else 's'} move {hub:.3g} times the model each way over the"
        f" busiest link, and the ring {ring:.3g} times; by bytes alone {wins} ({FORMULA})"
    )


def _beyond_wires(scope: Scope, results: Results, hub: str) -> list[str]:
    """Whether the links are what the hub waits for: one machine that plays all hosts has its own limit."""
    n, k, rate = scope.setting["workers"], scope.setting["servers"], scope.setting["link"]["rate"]
    sent, exposed = scope.number(hub, "bytes_sent_per_step"), scope.number(hub, "exposed_ms")
    if not rate or sent is None or exposed is None:
        return []
    needed = 1e3 * max(1.0, n / k) * sent["median"] / goodput(Link(rate=rate))
    if exposed["median"] < BEYOND * needed:
        return []
    return [
        f"yet at line rate that takes {needed:.0f} ms: what holds the hub up here is less its links than the"
        f" {results['machine']['cores']} cores on which {n + k} processes move the bytes of all of them"
    ]


def _cores(scope: Scope, results: Results, wins: bool) -> str:
    """Without a link nothing decides but processors and copies; more processes than cores are no help."""
    n, k, cores = scope.setting["workers"], scope.setting["servers"], results["machine"]["cores"]
    told = "on one machine copies and cores decide, not wires"
    if n + k <= cores:
        return f"{told}: every one of its {n + k} processes has a core"
    joint = ", though" if wins else ":"
    return f"{told}{joint} {n + k} busy processes share {cores} cores, where the ring has {n}"


def asynchronous(scope: Scope, results: Results) -> list[str]:
    """What each row that does not wait gains by step, and what becomes of that on the way to the target."""
    base = next((name for name in ("hub-bsp", "ring", "hub-aggregate") if name in scope.names), None)
    if base is None or scope.setting["workers"] < 2 or scope.setting["fault"]:
        return []
    rows = [row["row"] for row in scope.rows if not row["synchronous"]]
    return [scope.say(said) for name in rows if (said := _gain(scope, name, base, results))]


def _gain(scope: Scope, name: str, base: str, results: Results) -> str:
    pace = scope.ratio("samples_per_second", name, base)
    if pace is None:
        return ""
    faster = pace.decided and pace.value > 1
    if faster:
        step = f"{name} goes through its samples {pace} times as fast as {base}"
    elif pace.decided:
        step = f"{name} goes through its samples more slowly than {base}, at {pace} of its pace"
    else:
        step = f"{name} is even with {base} in samples a second"
    good, outcome = _outcome(scope, name, base, results)
    if not outcome:
        return ""
    joint = ("and" if good else "yet") if faster else ("yet" if good else "and")
    return f"{step}, {joint} {outcome}."


def _outcome(scope: Scope, name: str, base: str, results: Results) -> tuple[bool, str]:
    """Whether that paid, and the words for it; empty where there is nothing to say."""
    job = results["job"]
    goal = f"{job['title']} {job['target']:g}" if job["target"] is not None else ""
    mine, theirs = (scope.number(row, "seconds_to_target") for row in (name, base))
    reached = [number is not None and None not in number["values"] for number in (mine, theirs)]
    if goal and reached == [False, True]:
        return False, f"does not reach {goal} with every seed, as {base} does{_finals(scope, name, base)}"
    if goal and reached == [True, False]:
        return True, f"reaches {goal} with every seed, as {base} does not"
    ratio = scope.ratio("seconds_to_target", name, base) if all(reached) else None
    if ratio is not None and ratio.decided:
        sooner = ratio.value < 1
        times = scope.ratio("seconds_to_target", base, name) if sooner else ratio
        return sooner, f"reaches {goal} {times} times {'sooner' if sooner else 'later'}"
    return _final(scope, name, base, results)


def _final(scope: Scope, name: str, base: str, results: Results) -> tuple[bool, str]:
    """Where the two ended, if that is not even."""
    ratio = scope.ratio("final_metric", name, base)
    if ratio is None or not ratio.decided:
        return True, ""
    better = (ratio.value > 1) == results["job"]["rising"]
    return better, f"ends {'better' if better else 'worse'}{_finals(scope, name, base)}"


def _finals(scope: Scope, name: str, base: str) -> str:
    mine, theirs = (scope.number(row, "final_metric") for row in (name, base))
    if mine is None or theirs is None:
        return ""
    return f" (it ends at {mine['median']:.3f}, {base} at {theirs['median']:.3f})"
