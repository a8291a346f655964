"""The question of `ps-compare predict`, its answer, and how a terminal shows it, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from hubring.ps.core.errors import UsageError
from hubring.ps.page.kit.figures import digits
from hubring.workers.compare.plan import setting
from hubring.workers.compare.plan.experiment import check_list
from hubring.workers.compare.plan.experiment_file import load_experiment
from hubring.workers.compare.plan.row import Row
from hubring.workers.compare.plan.setting import Link, Setting
from hubring.workers.compare.predict.calibrations import BUNDLED, WIRES, Constants, link_of
from hubring.workers.compare.predict.exchange_terms import (
    most_servers,
    overtaking,
    servers_needed,
    with_servers,
)
from hubring.workers.compare.predict.prediction import (
    GLOO,
    NCCL,
    SCORED,
    THREAD,
    Forecast,
    PredictedJob,
    predict,
    read_row,
    wire_of,
)
from hubring.workers.peers.nccl_tests import busbw
from hubring.workers.runtime.slowdown import Straggler

ROWS = "local,ring,hub-bsp,hub-ssp,hub-asp"
GPU_ROWS = "nccl,nccl-ring,nccl-tree,nccl-two-level"
"""Rows of a calibration with GPUs, unless others are asked for."""
LIKE_RUN = (
    "rate",
    "latency",
    "jitter",
    "workers_per_host",
    "straggler",
    "straggler_ranks",
    "straggler_shape",
)
"""Options that mean what they mean in an experiment."""
MODELS = {"digits": 39720, "mlp": 100306848, "resnet50": 102228128}
"""Bytes of the models with these names in `ps-worker bench`."""


class PredictedRow(Struct, frozen=True, kw_only=True):
    """A prediction for the last line: `Forecast` in milliseconds, with its row and setting.

    `step_ms` is the mean step of a worker, `range_ms` the means of the fastest and the slowest seed; None
    without random delays. `busbw` is that of nccl-tests in GB/s; None for rows of another library.
    """

    row: str
    wire: str
    workers: int
    servers: int | None
    step_ms: float
    median_ms: float
    range_ms: tuple[float, float] | None
    samples_per_second: float | None
    efficiency: float
    by: str
    bound: str
    extrapolated: bool
    scored: bool
    busbw: float | None
    parts_ms: dict[str, float]


class ServersNeeded(Struct, frozen=True, kw_only=True):
    """The number of servers from which the hub beats the ring; None: no number up to `most_servers`."""

    workers: int
    by_bytes: int | None
    predicted: int | None
    most_servers: int


class PredictionAnswer(Struct, frozen=True, kw_only=True):
    """The answer to the question."""

    model_bytes: int
    compute_ms: float
    batch: float | None
    predictions: list[PredictedRow]
    crossover: list[ServersNeeded]


def answer_question(constants: Constants, given: Mapping[str, Any]) -> PredictionAnswer:
    """Returns all predictions, and the number of servers from which the hub beats the ring.

    Args:
        constants: Of the machine.
        given: The options of `ps-compare predict` by name; None where one is not set.

    Raises:
        UsageError: An option is invalid or contradicts another, or the calibration lacks a constant.
    """
    workers, servers = _counts("--workers", given["workers"]), _counts("--servers", given["servers"])
    link, straggler = _conditions(constants, given, max(workers))
    listed = given["rows"] or (ROWS if constants.cluster is None else GPU_ROWS)
    names = [name.strip() for name in listed.split(",")]
    check_list("--rows", names)
    rows, compute = list(map(read_row, names)), given["compute"]
    job = PredictedJob(
        nbytes=_size(given["model_bytes"], given["job"]),
        compute=(constants.compute or 0.0) if compute is None else setting.read_seconds(compute),
        wire="" if given["transport"] == "auto" else given["transport"],
        together=given["together"] or link is None,
        sharing=constants.cluster.gpus if constants.cluster else link.sharing if link else 1,
        **{name: given[name] for name in ("batch", "optimizer", "overlap", "slice_bytes", "buffer")},
    )
    seeds = range(given["seed"], given["seed"] + given["seeds"])
    predictions = []
    for count, row in product(workers, rows):
        if row.rule is None and count != workers[0]:
            continue  # one process, whatever the number of workers
        for number in servers if row.on_hub else servers[:1]:
            asked = Setting(workers=count, servers=number, link=link, straggler=_among(straggler, count))
            forecast = predict(constants, row, asked, job, steps=given["steps"], seeds=seeds)
            predictions.append(_predicted(row, asked, job, forecast))
    ours = any(row.name not in NCCL for row in rows)
    return PredictionAnswer(
        model_bytes=job.nbytes,
        compute_ms=1e3 * job.compute,
        batch=job.batch,
        predictions=predictions,
        crossover=[_servers_needed(constants, job, link, n) for n in workers if n > 1 and ours],
    )


def _conditions(
    constants: Constants, given: Mapping[str, Any], workers: int
) -> tuple[Link | None, Straggler | None]:
    """Returns the link and the slow workers; what no option says of the link is the calibration's."""
    known = link_of(constants) or Link()
    asked = {name: given[name] for name in LIKE_RUN}
    asked |= {name: getattr(known, name) for name in ("rate", "latency", "jitter") if asked[name] is None}
    slow, *more = load_experiment(None, {**asked, "rows": "ring", "workers": str(workers)}).settings
    if more:
        raise UsageError("predict takes one --rate, one --latency and one --straggler; ask once for each")
    kind, shape = slow.straggler and slow.straggler.kind, given["straggler_shape"]
    if shape is not None and kind != "pareto":
        raise UsageError(
            f"--straggler-shape {shape:g}: only a pareto delay has a shape, not {kind}; remove the flag"
        )
    return None if slow.link == Link() and constants.link is None else slow.link, slow.straggler


def _among(slow: Straggler | None, workers: int) -> Straggler | None:
    """Returns the slow workers without those beyond the number of workers; None if none is left."""
    if slow is None or not slow.ranks:
        return slow
    ranks = tuple(rank for rank in slow.ranks if rank < workers)
    return replace(slow, ranks=ranks) if ranks else None


_AS_FORECAST = ("samples_per_second", "efficiency", "by", "bound", "extrapolated")
"""What a predicted row has as its forecast has it."""


def _predicted(row: Row, asked: Setting, job: PredictedJob, forecast: Forecast) -> PredictedRow:
    low, high = forecast.low, forecast.high
    timed = row.name in NCCL and forecast.exchange
    return PredictedRow(
        row=row.name,
        wire=wire_of(row, asked, job),
        workers=1 if row.rule is None else asked.workers,
        servers=asked.servers if row.on_hub else None,
        step_ms=1e3 * forecast.step_seconds,
        median_ms=1e3 * forecast.median_seconds,
        range_ms=None if low == high else (1e3 * low, 1e3 * high),
        busbw=busbw(job.nbytes, forecast.exchange, asked.workers) if timed else None,
        scored=row.name in SCORED,
        parts_ms={name: 1e3 * seconds for name, seconds in forecast.parts.items()},
        **{name: getattr(forecast, name) for name in _AS_FORECAST},
    )


def _servers_needed(
    constants: Constants, job: PredictedJob, link: Link | None, workers: int
) -> ServersNeeded:
    """Returns the number of servers from which bsp is faster than the ring, with equal workers."""

    def step(row: str, servers: int = 1) -> float:
        return predict(constants, row, Setting(workers=workers, servers=servers, link=link), job).step_seconds

    return ServersNeeded(
        workers=workers,
        by_bytes=servers_needed(workers, min(job.sharing, workers)),
        predicted=overtaking(lambda servers: step("hub-bsp", servers), step("ring"), workers),
        most_servers=most_servers(workers),
    )


def _counts(flag: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} {text}: expected comma-separated numbers from 1, such as 1,2,4")
    counts = tuple(int(word) for word in words)
    check_list(flag, counts)
    return counts


def _size(model_bytes: int | None, job: str | None) -> int:
    if model_bytes is not None:
        if job is not None:
            raise UsageError("--model-bytes and --job both set the model's size; use one of them")
        return model_bytes
    name = job or "digits"
    if name not in MODELS:
        raise UsageError(f"--job {job}: expected one of {', '.join(MODELS)}; else use --model-bytes")
    return MODELS[name]


NOTHING = "-"
MARK = "*"
WIDE = 160
"""Columns of an output that is no terminal."""
WORDS = ("row", "", "bound by", "found by")
"""Columns of text."""


def show_answer(answer: PredictionAnswer, constants: Constants, calibration: str) -> None:
    """Prints the question, one line per prediction, and where the hub overtakes the ring.

    Args:
        answer: The answer.
        constants: What it was predicted with.
        calibration: Name or file of the constants; empty: measured now.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDE
    table, columns = Table(box=None, pad_edge=False), _columns(answer)
    for head in columns:
        table.add_column(head, justify="left" if head in WORDS else "right")
    for each in answer.predictions:
        table.add_row(*(cell(each) for cell in columns.values()))
    console.print(_question(answer, constants, calibration), soft_wrap=True)
    console.print(table)
    for note in _notes(answer, constants):
        console.print(note, soft_wrap=True)
    for found in answer.crossover:
        by_bytes, never = with_servers(found.by_bytes), f"with no number up to {found.most_servers}"
        here = never if found.predicted is None else with_servers(found.predicted)
        console.print(
            f"{found.workers} workers: by bytes alone hub-bsp is faster than the ring {by_bytes},"
            f" by this calibration {here}",
            soft_wrap=True,
        )


def _question(answer: PredictionAnswer, constants: Constants, calibration: str) -> str:
    """Describes the job and the calibration."""
    computing = f"{answer.compute_ms:g} ms" if answer.compute_ms else "no time"
    job = f"a model of {answer.model_bytes:,} bytes, computing {computing} a step"
    machine = f"{constants.machine.get('processor', 'an unknown processor')}, {constants.cores} cores"
    if not calibration:
        hint = "not saved; `ps-compare calibrate` saves one"
        return f"{job}; calibration: measured now on {machine} ({hint})"
    when = f"measured {constants.date or 'at an unknown time'} on {machine}"
    if constants.cluster is not None:
        sources = ", ".join(constants.cluster.sources) or "your options and output of nccl-tests"
        gpus = f"nodes of {constants.cluster.gpus} GPUs"
        return f"{job}; calibration: {calibration}, {gpus}, from {sources}"
    if calibration in BUNDLED:
        hint = "not your machine; add --calibrate to measure it"
        return f"{job}; bundled calibration: {calibration}, {when} ({hint})"
    return f"{job}; calibration: {calibration}, {when}"


def _columns(answer: PredictionAnswer) -> dict[str, Callable[[PredictedRow], str]]:
    """Returns the columns; speed needs the job's batch size, efficiency its compute time."""
    columns: dict[str, Callable[[PredictedRow], str]] = {
        "workers": lambda each: str(each.workers),
        "row": lambda each: f"{each.row} (Gloo)" if each.row in GLOO and each.wire == "gloo" else each.row,
        "servers": lambda each: NOTHING if each.servers is None else str(each.servers),
        "step ms": lambda each: digits(each.step_ms, 4) + MARK * each.extrapolated,
        "": lambda each: "" if each.scored else "not scored",
    }
    if all(each.servers is None for each in answer.predictions):
        del columns["servers"]
    if any(each.range_ms for each in answer.predictions):
        columns["of the seeds"] = lambda each: (
            NOTHING if each.range_ms is None else " to ".join(digits(end, 4) for end in each.range_ms)
        )
    if answer.batch is not None:
        columns["samples/s"] = lambda each: digits(each.samples_per_second or 0.0, 4)
    if answer.compute_ms:
        columns["efficiency"] = lambda each: f"{each.efficiency:.0%}"
    if any(each.busbw for each in answer.predictions):
        columns["busbw GB/s"] = lambda each: NOTHING if each.busbw is None else digits(each.busbw, 4)
    return columns | {"bound by": lambda each: each.bound, "found by": lambda each: each.by}


def _notes(answer: PredictionAnswer, constants: Constants) -> Iterator[str]:
    """Yields what a reader must know about the table."""
    beyond = [each for each in answer.predictions if each.extrapolated]
    if any(each.busbw is None for each in beyond):
        wires = ", ".join(
            f"{name} {constants.fastest(name) / 1e9:.3g} Gbit/s" for name in WIRES if name != "shm"
        )
        yield f"{MARK} extrapolated: the link is faster than what this calibration reached ({wires})"
    if any(each.busbw is not None for each in beyond):
        yield f"{MARK} extrapolated: no sweep has as many nodes and GPUs, these links and this size"
    if not all(each.scored for each in answer.predictions):
        yield "not scored: the error of this row's predictions was not measured on any machine"
    shown = {each.row for each in answer.predictions}
    if constants.cluster is not None and not any(row == "ring" or row.startswith("hub-") for row in shown):
        yield (
            "ring and hub-bsp are not shown: their bytes pass the hosts' processors, which nccl-tests do not"
            " measure. To predict both with the processors of the calibration `host`, add"
            " --rows nccl,ring,hub-bsp."
        )
    if any(each.bound == THREAD for each in answer.predictions):
        yield (
            f"{THREAD}: not the link but the calibrated host moves the bytes that slowly;"
            " calibrate on the hosts that you will use"
        )
