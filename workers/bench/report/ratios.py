"""The targets of the bench: each target ratio, the measured ratio, and whether the target is met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Entry = Mapping[str, Any]
"""An object of the bench's JSON; for the fields see `hubring.workers.bench.report.table.Entry`."""
Case = tuple[int, str, str]
"""Ranks, shape, optimizer."""

LIMIT = "limit of memory"
"""The faster of `BOUNDS`."""
BOUNDS = ("bound-memory", "bound-memory-2")
MODELS = ("flat", "resnet50")
OPTIMIZERS = ("sgd", "adam")
SIZES = (1, 2, 4)
FLAT_BYTES = 100 << 20
"""The targets of the shape flat apply to this size."""


class Times(NamedTuple):
    """The time of a row in a case."""

    row: str
    case: Case

    def of(self, entries: Sequence[Entry]) -> float | None:
        """Returns the median in ms; None if it was not measured."""
        rows = BOUNDS if self.row == LIMIT else (self.row,)
        found = [
            each["median_ms"]
            for each in entries
            if each["row"] in rows
            and _case(each) == self.case
            and (each["shape"] != "flat" or each["bytes"] == FLAT_BYTES)
        ]
        return min(found, default=None)


class Target(NamedTuple):
    """A target for a ratio of times, or for one time.

    Attributes:
        over: The dividend.
        under: The divisor; None: the target is in milliseconds.
        wanted: The target.
        least: Whether the target is a minimum; otherwise it is a maximum.
    """

    over: Times
    under: Times | None
    wanted: float
    least: bool = False

    def measured(self, entries: Sequence[Entry]) -> float | None:
        """Returns the measured ratio; None if a part was not measured."""
        over = self.over.of(entries)
        under = 1.0 if self.under is None else self.under.of(entries)
        return None if over is None or under is None else over / under

    def reached(self, measured: float) -> bool:
        """Whether the measured value meets the target."""
        return measured >= self.wanted if self.least else measured <= self.wanted

    def __str__(self) -> str:
        if self.under is None:
            return f"{_code(self.over.row)}, ms"
        if self.under.row == self.over.row:
            return f"{_code(self.over.row)}: {self.over.case[1]} / {self.under.case[1]}"
        return f"{_code(self.over.row)} / {_code(self.under.row)}"


def targets() -> Iterator[Target]:
    """Yields all targets, in the table's order."""
    for case in [(n, shape, optimizer) for shape in MODELS for optimizer in OPTIMIZERS for n in SIZES]:
        yield from _memory(case)
    for n in SIZES:
        yield from _wire((n, "flat", "sgd"))
    lone = (1, "lone", "sgd")
    yield Target(Times("hub-shm", lone), None, 0.25)
    yield Target(Times("hub-zmq", lone), None, 0.4)
    for row in ("hub-shm", "hub-zmq"):
        yield Target(Times(row, (2, "thousand", "sgd")), Times(row, (2, "thousand-flat", "sgd")), 1.15)
    for shape in ("mlp", "digits"):
        yield _target("ddp-gloo", "hub-shm", (2, shape, "sgd"), 1.5, least=True)


def table(entries: Sequence[Entry]) -> str:
    """Returns a Markdown table; empty if no target was measured."""
    found = [(target, measured) for target in targets() if (measured := target.measured(entries)) is not None]
    lines = [_line(*each) for each in found]
    head = "| case | ratio of medians | target | measured | met |\n| --- | --- | ---: | ---: | --- |"
    return "\n".join([head, *lines]) if lines else ""


def _memory(case: Case) -> Iterator[Target]:
    """Targets on one host: against peers, the memory limit, and a hub with colocated shards."""
    n = case[0]
    if n > 1:  # a peer with one rank exchanges nothing
        yield _target("gloo+sgd", "hub-shm", case, 7 if n == 4 else 5, least=True)
        yield _target("mpi", "hub-shm", case, 3, least=True)
    yield _target("hub-shm", LIMIT, case, 1.5)
    if n > 1:
        yield _target("hub-colo", "hub-shm", case, 1)


def _wire(case: Case) -> Iterator[Target]:
    """Targets over sockets, with one server each."""
    yield _target("hub-zmq", "raw-tcp", case, 1.25)
    yield _target("hub-grpc", "hub-zmq", case, 2.5)


def _target(over: str, under: str, case: Case, wanted: float, *, least: bool = False) -> Target:
    return Target(Times(over, case), Times(under, case), wanted, least)


def _line(target: Target, measured: float) -> str:
    n, shape, optimizer = target.over.case
    case = f"{n} worker{'s' * (n > 1)}, {shape}, {optimizer}"
    wanted = f"{'≥' if target.least else '≤'} {target.wanted:g}"
    answer = "yes" if target.reached(measured) else "no"
    return f"| {case} | {target} | {wanted} | {measured:.3f} | {answer} |"


def _case(entry: Entry) -> Case:
    return entry["n"], entry["shape"], entry["optimizer"]


def _code(row: str) -> str:
    return row if row == LIMIT else f"`{row}`"
