"""Speed by workers and servers: the crossover of hub and ring, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from msgspec.structs import replace

from hubring.workers.compare.decide.decision import SPEED, Comparisons, Decision
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.setting import Setting, without_servers
from hubring.workers.compare.predict.calibrations import Constants
from hubring.workers.compare.predict.exchange_terms import FORMULA, servers_needed
from hubring.workers.compare.predict.prediction import PredictedJob
from hubring.workers.compare.predict.score import Score, model_bytes
from hubring.workers.compare.predict.slicing import tensors
from hubring.workers.compare.record.findings import Crossover, Findings, RowResult, Scaling


def crossovers(
    settings: Sequence[Setting],
    rows: Sequence[RowResult],
    predict: Callable[[Setting], int | None] | None = None,
) -> list[Crossover]:
    """Returns where the hub should begin to win, for settings with a link that differ only in servers.

    `won_from` adds where it was measured to win.

    Args:
        settings: Of the experiment.
        rows: Measured rows; a setting counts only if both hub-bsp and the ring were measured.
        predict: Returns the number of servers from which the hub wins; None: no calibrated model.
    """
    found = []
    for first, *others in _groups(settings, "servers"):
        group = [first, *others]
        tried = [each.servers for each in group if _measured(rows, each.key)]
        if len(tried) < 2 or first.link is None or first.fault is not None:
            continue
        crossover = Crossover(
            setting=without_servers(first.key),
            tried=tried,
            predicted=None if predict is None else predict(first),
            calibrated=predict is not None,
            by_bytes=servers_needed(first.workers),
            formula=FORMULA,
        )
        found.append(crossover)
    return found


def won_from(compared: Comparisons) -> list[Crossover]:
    """Returns the crossovers with the fewest servers from which the hub is clearly faster.

    With numbers of servers that are not decided, they say which these are. Speeds are samples per second, as
    in the rest of the verdict, so that the two cannot contradict each other.
    """
    crossed = []
    for each in compared.findings.crossover:
        group = [one for one in compared.findings.settings if without_servers(one.key) == each.setting]
        by_servers = {setting.servers: setting.key for setting in group}
        first, undecided = _from_on({n: _won(compared, by_servers[n]) for n in each.tried})
        crossed.append(replace(each, measured=first, undecided=undecided))
    return crossed


def _won(compared: Comparisons, setting: str) -> bool | None:
    """Whether the hub is faster than the ring in this setting; None if it is not decided."""
    raced = {row.row: row for row in compared.findings.under(setting)}
    times_as_fast = compared.ratio(SPEED, raced["hub-bsp"], raced["ring"])
    assert times_as_fast is not None
    won = {Decision.LARGER: True, Decision.SMALLER: False, Decision.EVEN: False}
    return won.get(times_as_fast.decision)


def _measured(rows: Iterable[RowResult], setting: str) -> bool:
    """Whether the speeds of both hub-bsp and the ring were measured, with a common seed."""
    speeds = {row.row: row.number("samples_per_second") for row in rows if row.setting == setting}
    hub, ring = speeds.get("hub-bsp"), speeds.get("ring")
    if hub is None or ring is None:
        return False
    return any(a and b for a, b in zip(hub.values, ring.values, strict=True))


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


def scaling(settings: Sequence[Setting], rows: Sequence[RowResult]) -> list[Scaling]:
    """Returns samples per second by workers, from the first settings that differ only in workers.

    `local` has one process whatever the setting, so it is not in it.
    """
    group = next((group for group in _groups(settings, "workers") if len(group) > 1), [])
    if not group:
        return []
    speeds = {(row.setting, row.row): row.median("samples_per_second") for row in rows}
    return [
        Scaling(
            row=name,
            workers=[setting.workers for setting in group],
            measured=[speeds.get((setting.key, name)) for setting in group],
            predicted=[None] * len(group),
        )
        for name in dict.fromkeys(row.row for row in rows if row.row != "local")
    ]


def _groups(settings: Iterable[Setting], axis: str) -> list[list[Setting]]:
    """Returns settings that differ only in one field, in ascending order of it."""
    groups: dict[tuple[object, ...], list[Setting]] = {}
    rest = attrgetter(*(name for name in Setting.__struct_fields__ if name not in (axis, "key")))
    for setting in settings:
        groups.setdefault(rest(setting), []).append(setting)
    return [sorted(group, key=attrgetter(axis)) for group in groups.values()]


OPTIMIZERS = {"char-lm": "adam"}
"""Optimizers of built-in jobs that do not use SGD."""


def predicted(found: Findings, constants: Constants | None) -> Findings:
    """Returns the findings with `predictions`, `score`, `crossover` and `scaling`.

    Args:
        found: The measured findings.
        constants: Of the machine or cluster of the runs; None: not measured. They are of Gloo, so runs with
            NCCL are not predicted.
    """
    settings, rows = found.settings, found.rows
    nbytes, scales = model_bytes(settings, rows), scaling(settings, rows)
    if constants is None or nbytes is None or found.asked.backend == "nccl":
        return replace(found, crossover=crossovers(settings, rows), scaling=scales)
    model = Score(settings, rows, constants, trained(found.asked, nbytes), found.asked.seeds)
    predictions = model.predictions()
    return replace(
        found,
        predictions=predictions,
        score=model.accuracy(predictions),
        crossover=crossovers(
            settings, rows, model.crossover if {"ring", "hub-bsp"} <= model.calibrated else None
        ),
        scaling=[*model.scaling(), *(each for each in scales if each.row not in model.calibrated)],
    )


def trained(experiment: Experiment, model_bytes: int) -> PredictedJob:
    """Returns what was trained, and the transport."""
    return PredictedJob(
        nbytes=model_bytes,
        optimizer=OPTIMIZERS.get(experiment.job or "", "sgd"),
        wire="" if experiment.transport == "auto" else experiment.transport,
        together=True,
        slice_bytes=experiment.slice_bytes,
        tensors=tensors(experiment.job, model_bytes),
    )
