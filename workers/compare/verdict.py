"""What the numbers say, in plain words: nobody is called a winner whom the intervals do not show as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workers.compare import rivals
from workers.compare.contest import Ratio
from workers.compare.hardships import hardships
from workers.compare.scope import Scope, scopes

Results = Mapping[str, Any]


def verdict(results: Results) -> list[str]:
    """Sentences, from what is withheld to how far all of it can be trusted.

    Args:
        results: As in `results.json`, this part not yet there.
    """
    parts: list[Callable[[Scope, Results], list[str]]] = [
        _withheld,
        _failed,
        _to_target,
        rivals.hub_against_ring,
        _against_one_process,
        rivals.asynchronous,
    ]
    said = [sentence for part in parts for scope in scopes(results) for sentence in part(scope, results)]
    return [*dict.fromkeys(said), *_crossover(results), *hardships(results), *_caveats(results)]


def _withheld(scope: Scope, results: Results) -> list[str]:
    return [
        scope.say(f"no speed is shown for {row['row']}: {row['withheld']}.")
        for row in scope.rows
        if row["withheld"] is not None
    ]


def _failed(scope: Scope, results: Results) -> list[str]:
    fault = scope.setting["fault"]
    return [
        scope.say(
            f"{row['row']} did not survive the loss of worker {fault['rank']} at step {fault['step']}"
            f" ({row['failed'].rstrip('.')})."
        )
        for row in scope.rows
        if row["failed"] is not None and fault is not None
    ]


def _to_target(scope: Scope, results: Results) -> list[str]:
    """Who was first, who was even with it, how much longer the others needed, and who missed the target."""
    job = results["job"]
    if job["target"] is None:
        return []
    goal = f"{job['title']} {job['target']:g}"
    times = {name: scope.number(name, "seconds_to_target") for name in scope.names}
    missed = [
        scope.say(f"{name} {_missing(scope, name)} {goal}.")
        for name in scope.names
        if _missing(scope, name) and not scope.row(name)["withheld"]
    ]
    racing = {name: time for name, time in times.items() if time and None not in time["values"]}
    order = sorted(racing, key=lambda name: float(racing[name]["median"]))
    if not order:
        return missed
    first = order[0]
    behind = {name: scope.ratio("seconds_to_target", name, first) for name in order[1:]}
    even = [name for name, ratio in behind.items() if ratio is None or not ratio.decided]
    later = [f"{name} needs {ratio} times as long" for name, ratio in behind.items() if _decided(ratio)]
    seconds = " and ".join(f"{racing[name]['median']:.2f} s" for name in (first, *even))
    if even:
        begin = f"first to {goal} are {' and '.join((first, *even))}, even in {seconds}"
    else:
        begin = f"first to {goal} is {first}, in {seconds}"
    return [scope.say(f"{begin}{'; ' if later else ''}{', '.join(later)}."), *missed]


def _decided(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.decided


def _missing(scope: Scope, name: str) -> str:
    """In words, with how many seeds a row missed the target; empty if with none."""
    number, seeds = scope.number(name, "seconds_to_target"), len(scope.row(name)["seeds"])
    if number is None:
        return "did not reach" if seeds == 1 else f"with none of {seeds} seeds reached"
    reached = sum(value is not None for value in number["values"])
    return "" if reached == seeds else f"with {reached} of {seeds} seeds only reached"


def _against_one_process(scope: Scope, results: Results) -> list[str]:
    """Whether it paid to divide the work at all."""
    speeds = {
        name: number["median"] for name in scope.names if (number := scope.number(name, "samples_per_second"))
    }
    if "local" not in speeds or len(speeds) < 2 or scope.setting["workers"] < 2:
        return []
    best = max((name for name in speeds if name != "local"), key=lambda name: float(speeds[name]))
    ratio = scope.ratio("samples_per_second", best, "local")
    assert ratio is not None
    contest = rivals.contest(
        f"{best}, the fastest of many workers,", "one process alone", scope, (best, "local"), results
    )
    if not ratio.decided or ratio.value > 1:
        return [scope.say(contest)]
    why = "this job is too small, or this machine has too few cores, for dividing it to pay"
    return [scope.say(f"{contest[:-1]}: {why}.")]


def _crossover(results: Results) -> list[str]:
    """From how many servers on the hub wins, by measurement and by formula."""
    said = []
    for each in results["crossover"]:
        tried = ", ".join(map(str, each["tried"]))
        measured = (
            f"the hub steps faster than the ring from {each['measured']} servers on"
            if each["measured"] is not None
            else "the ring steps faster than the hub with any"
        )
        formula = (
            f"the formula {each['formula']} says from {each['predicted']} on"
            if each["predicted"] is not None
            else "by the formula it never does"
        )
        said.append(f"{each['setting']}, {tried} servers tried: {measured}; {formula}.")
    return said


def _caveats(results: Results) -> list[str]:
    """How far all of this can be trusted."""
    said = []
    experiment = results["experiment"]
    if experiment["lr"] == "linear":
        said.append("All rows were given the job's learning rate times their workers (lr = linear).")
    if experiment["lr"] == "per-worker":
        said.append(
            "Asynchronous rows were given the job's learning rate by their workers (lr = per-worker)."
        )
    if any(row["emulated"] for row in results["rows"]):
        said.append("Workers slept for a part of every step: these are times of an emulated machine.")
    if not results["noise"]["quiet"]:
        said.append(f"The machine was not idle. {' '.join(results['noise']['said'])}")
    if len(experiment["seeds"]) == 1:
        said.append("Everything ran with one seed, so nothing here tells chance from difference.")
    return said
