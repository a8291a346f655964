"""Terminal output of calibration and prediction; all of it on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from hubring.ps.page.kit.figures import digits
from hubring.workers.compare.cost.calibrations import Calibration
from hubring.workers.compare.cost.model.constants import WIRES, Constants
from hubring.workers.compare.cost.prediction import THREAD
from hubring.workers.compare.cost.question import Answer, Answered, Crossing
from hubring.workers.compare.cost.row_case import GLOO

NOTHING = "-"
MARK = "*"
WIDE = 160
"""Columns of an output that is no terminal."""
WORDS = ("row", "bound by", "found by")
"""Columns of text."""


def show_constants(constants: Constants) -> None:
    """Prints one line per figure, with median, minimum and maximum."""
    table = Table("figure", "median", "min", "max", "unit", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, median in _figures(constants).items():
        scale, unit = _unit(name)
        low, high = constants.spread.get(name, (median, median))
        table.add_row(name, *(f"{scale * value:.3g}" for value in (median, low, high)), unit)
    console = Console(stderr=True, highlight=False)
    console.print(table)
    console.print("alpha: one message one way. beta: a byte, both ways at once. cpu: both ends.", style="dim")


def _figures(constants: Constants) -> dict[str, float]:
    """Returns medians by their names in the spread."""
    found = {"copy": constants.copy, "reduce": constants.reduce, "serve": constants.serve}
    found |= {f"apply.{name}": value for name, value in constants.apply.items()}
    for name, wire in constants.wires.items():
        figures = {"alpha": wire.alpha, "beta": wire.beta, "cpu": wire.cpu}
        found |= {f"{name}.{figure}": value for figure, value in figures.items() if value}
    if constants.link is not None and constants.link.rate is not None:
        found["link.rate"] = constants.link.rate
    if constants.link is not None:
        found["link.latency"] = constants.link.latency
    return found | ({} if constants.compute is None else {"compute": constants.compute})


def _unit(name: str) -> tuple[float, str]:
    if name == "compute":
        return 1e3, "ms per step"
    if name == "link.rate":
        return 1e-9, "Gbit/s"
    if name.endswith(("alpha", "latency")) or name == "serve":
        return 1e6, "us a message"
    return 1e9, "ns a byte"


def show_answer(answer: Answer, constants: Constants, calibration: Calibration) -> None:
    """Prints the question, one line per prediction, and where the hub overtakes the ring."""
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
    for crossing in answer.crossover:
        console.print(_crossover(crossing), soft_wrap=True)


def _question(answer: Answer, constants: Constants, calibration: Calibration) -> str:
    """Describes the job and the calibration."""
    computing = f"{answer.compute_ms:g} ms" if answer.compute_ms else "no time"
    job = f"a model of {answer.model_bytes:,} bytes, computing {computing} a step"
    machine = f"{constants.machine.get('processor', 'an unknown processor')}, {constants.cores} cores"
    if not calibration.name:
        hint = "not saved; `ps-compare calibrate` saves one"
        return f"{job}; calibration: measured now on {machine} ({hint})"
    when = f"measured {constants.date or 'at an unknown time'} on {machine}"
    if constants.cluster is not None:
        sources = ", ".join(constants.cluster.sources) or "your options and output of nccl-tests"
        gpus = f"nodes of {constants.cluster.gpus} GPUs"
        return f"{job}; calibration: {calibration.name}, {gpus}, from {sources}"
    if calibration.bundled:
        hint = "not your machine; add --calibrate to measure it"
        return f"{job}; bundled calibration: {calibration.name}, {when} ({hint})"
    return f"{job}; calibration: {calibration.name}, {when}"


def _columns(answer: Answer) -> dict[str, Callable[[Answered], str]]:
    """Returns the columns; speed needs the job's batch size, efficiency its compute time."""
    columns: dict[str, Callable[[Answered], str]] = {
        "workers": lambda each: str(each.workers),
        "row": lambda each: f"{each.row} (Gloo)" if each.row in GLOO else each.row,
        "servers": lambda each: NOTHING if each.servers is None else str(each.servers),
        "step ms": lambda each: digits(each.step_ms, 4) + MARK * each.extrapolated,
    }
    if all(each.servers is None for each in answer.predictions):
        del columns["servers"]
    if any(each.range_ms for each in answer.predictions):
        columns["of the seeds"] = _seeds
    if answer.batch is not None:
        columns["samples/s"] = lambda each: digits(each.samples_per_second or 0.0, 4)
    if answer.compute_ms:
        columns["efficiency"] = lambda each: f"{each.efficiency:.0%}"
    if any(each.busbw for each in answer.predictions):
        columns["busbw GB/s"] = lambda each: NOTHING if each.busbw is None else digits(each.busbw, 4)
    return columns | {
        "bound by": lambda each: each.bound,
        "found by": lambda each: each.by,
    }


def _seeds(each: Answered) -> str:
    return NOTHING if each.range_ms is None else " to ".join(digits(end, 4) for end in each.range_ms)


def _notes(answer: Answer, constants: Constants) -> Iterator[str]:
    """Yields what a reader must know about the table."""
    beyond = [each for each in answer.predictions if each.extrapolated]
    if any(each.busbw is None for each in beyond):
        wires = ", ".join(
            f"{name} {constants.fastest(name) / 1e9:.3g} Gbit/s" for name in WIRES if name != "shm"
        )
        yield f"{MARK} extrapolated: the link is faster than what this calibration reached ({wires})"
    if any(each.busbw is not None for each in beyond):
        yield f"{MARK} extrapolated: no sweep has as many nodes and GPUs, these links and this size"
    shown = {each.row for each in answer.predictions}
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


def _crossover(each: Crossing) -> str:
    """Describes the crossover."""
    needed, servers = each.by_bytes, each.predicted
    by_bytes = "with no number of servers" if needed is None else f"with {needed} or more servers"
    here = (
        f"with no number up to {each.most_servers}" if servers is None else f"with {servers} or more servers"
    )
    return (
        f"{each.workers} workers: by bytes alone hub-bsp is faster than the ring {by_bytes},"
        f" by this calibration {here}"
    )
