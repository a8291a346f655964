"""What a person sees of calibration and prediction; all of it on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from workers.compare.cost.constants import Constants

NOTHING = "-"


def show_constants(constants: Constants) -> None:
    """One line a figure, with the least and the most that was measured."""
    table = Table("figure", "median", "least", "most", "unit", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, median in _figures(constants).items():
        scale, unit = _unit(name)
        low, high = constants.spread.get(name, (median, median))
        table.add_row(name, *(f"{scale * value:.3g}" for value in (median, low, high)), unit)
    console = Console(stderr=True, highlight=False)
    console.print(table)
    console.print("alpha: one message one way. beta: a byte each way at once. cpu: both ends.", style="dim")


def _figures(constants: Constants) -> dict[str, float]:
    """Medians by the names that the spread has."""
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
        return 1e3, "ms a step"
    if name == "link.rate":
        return 1e-9, "Gbit/s"
    if name.endswith(("alpha", "latency")) or name == "serve":
        return 1e6, "us a message"
    return 1e9, "ns a byte"


def show_answer(answer: Mapping[str, Any]) -> None:
    """One line a prediction, then where the hub overtakes the ring."""
    console = Console(stderr=True, highlight=False)
    heads = ("workers", "row", "servers", "step ms", "samples/s", "efficiency", "bound by", "found by")
    table = Table(*heads, box=None, pad_edge=False)
    for index in (0, 2, 3, 4, 5):
        table.columns[index].justify = "right"
    for each in answer["predictions"]:
        table.add_row(*_cells(each, computing=bool(answer["compute_ms"])))
    console.print(table)
    for each in answer["crossover"]:
        console.print(_told(each), soft_wrap=True)


def _cells(each: Mapping[str, Any], *, computing: bool) -> list[str]:
    return [
        str(each["workers"]),
        each["row"],
        NOTHING if each["servers"] is None else str(each["servers"]),
        f"{each['step_ms']:.4g}",
        f"{each['samples_per_second']:,.4g}",
        f"{each['efficiency']:.0%}" if computing else NOTHING,
        each["bound"],
        each["by"],
    ]


def _told(each: Mapping[str, Any]) -> str:
    """The crossover in words."""
    workers, needed = each["workers"], each["formula"]
    told = f"{workers} workers: at line rate the hub wins with more than {needed:.4g} servers"
    if each["predicted"] is None:
        return f"{told}; here the ring is faster up to {workers}"
    servers = each["predicted"]
    return f"{told}; here bsp is as fast as the ring from {servers} server{'s' * (servers > 1)} on"
