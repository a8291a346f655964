"""The tables of RESULTS.md, rendered from the bench's JSON, with each target and whether it is met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec

from hubring.ps.core.errors import ConfigError
from hubring.workers.bench.case import BenchCase, BenchEntry
from hubring.workers.bench.row import ROWS

LIMIT = "limit of memory"
"""The faster of `BOUNDS`."""
BOUNDS = ("bound-memory", "bound-memory-2")
MODELS = ("flat", "resnet50")
OPTIMIZERS = ("sgd", "adam")
SIZES = (1, 2, 4)
FLAT_BYTES = 100 << 20
"""The targets of the shape flat apply to this size."""


def _median(row: str, case: BenchCase, entries: Sequence[BenchEntry]) -> float | None:
    """Returns a row's median in ms; None if it was not measured."""
    rows = BOUNDS if row == LIMIT else (row,)
    found = [
        each.median_ms
        for each in entries
        if each.row in rows
        and (each.n, each.shape, each.optimizer) == case
        and (each.shape != "flat" or each.bytes == FLAT_BYTES)
    ]
    return min(found, default=None)


class RatioTarget(NamedTuple):
    """A target for a ratio of times, or for one time.

    Attributes:
        over: The row of the dividend.
        under: The row of the divisor; empty: the target is in milliseconds.
        case: The case.
        wanted: The target.
        least: Whether the target is a minimum; otherwise it is a maximum.
        under_shape: The shape of the divisor; empty: that of the case.
    """

    over: str
    under: str
    case: BenchCase
    wanted: float
    least: bool = False
    under_shape: str = ""

    @property
    def under_case(self) -> BenchCase:
        """The case of the divisor."""
        return self.case._replace(shape=self.under_shape or self.case.shape)

    def measured(self, entries: Sequence[BenchEntry]) -> float | None:
        """Returns the measured ratio; None if a part was not measured."""
        over = _median(self.over, self.case, entries)
        under = _median(self.under, self.under_case, entries) if self.under else 1.0
        return None if over is None or under is None else over / under

    def reached(self, measured: float) -> bool:
        """Whether the measured value meets the target."""
        return measured >= self.wanted if self.least else measured <= self.wanted

    def __str__(self) -> str:
        if not self.under:
            return f"{_code(self.over)}, ms"
        if self.under == self.over:
            return f"{_code(self.over)}: {self.case.shape} / {self.under_shape}"
        return f"{_code(self.over)} / {_code(self.under)}"


def targets() -> Iterator[RatioTarget]:
    """Yields all targets, in the table's order."""
    for shape, optimizer, n in product(MODELS, OPTIMIZERS, SIZES):
        yield from _memory(BenchCase(n, shape, optimizer))
    for n in SIZES:
        yield from _wire(BenchCase(n, "flat", "sgd"))
    lone = BenchCase(1, "lone", "sgd")
    yield RatioTarget("hub-shm", "", lone, 0.25)
    yield RatioTarget("hub-zmq", "", lone, 0.4)
    for row in ("hub-shm", "hub-zmq"):
        yield RatioTarget(row, row, BenchCase(2, "thousand", "sgd"), 1.15, under_shape="thousand-flat")
    for shape in ("mlp", "digits"):
        yield RatioTarget("ddp-gloo", "hub-shm", BenchCase(2, shape, "sgd"), 1.5, least=True)


def ratio_table(entries: Sequence[BenchEntry]) -> str:
    """Returns a Markdown table with a line for each target; empty if none was measured."""
    found: dict[str, list[str]] = {}
    for target in targets():
        if (measured := target.measured(entries)) is not None:
            wanted = f"| {target} | {'≥' if target.least else '≤'} {target.wanted:g}"
            missed = "" if target.reached(measured) else " **missed**"
            case = ":".join(map(str, target.case))
            found.setdefault(wanted, []).append(f"{measured:.3f}{missed} ({case})")
    head = "| ratio of medians | target | measured (case) |\n| --- | ---: | --- |"
    lines = [f"{wanted} | {', '.join(cases)} |" for wanted, cases in found.items()]
    return "\n".join([head, *lines]) if lines else ""


def _memory(case: BenchCase) -> Iterator[RatioTarget]:
    """Targets on one host: against peers, the memory limit, and a hub with colocated shards."""
    n = case.n
    if n > 1:  # a peer with one rank exchanges nothing
        yield RatioTarget("gloo+sgd", "hub-shm", case, 7 if n == 4 else 5, least=True)
        yield RatioTarget("mpi", "hub-shm", case, 3, least=True)
    yield RatioTarget("hub-shm", LIMIT, case, 1.5)
    if n > 1:
        yield RatioTarget("hub-colo", "hub-shm", case, 1)
        yield RatioTarget("ring", "bound-copy", case, 1.3)


def _wire(case: BenchCase) -> Iterator[RatioTarget]:
    """Targets over sockets, with one server each."""
    yield RatioTarget("hub-zmq-tcp", WIRE_BOUND, case, 1.25)
    yield RatioTarget(AES_ROW, AES_BOUND, case, 1.25)
    yield RatioTarget("hub-grpc", "hub-zmq", case, 2.5)


def _code(row: str) -> str:
    return row if row == LIMIT else f"`{row}`"


BEGIN, END = "<!-- made by ps-worker bench --summary -->", "<!-- until here -->"
PEER = "gloo+sgd"
WIRE_BOUND = "raw-tcp"
AES_ROW, AES_BOUND = "hub-zmq-aes", "raw-tcp-aes"
TRAINED_PEER = "ddp-gloo"
EXCHANGED = ("peer", "limit")
TRAINED = ("samples/s", "exposed ms", "peer")
OVER_WIRE = ("hub-zmq", "hub-zmq-tcp", "hub-zmq-bf16", "hub-zmq-int8", "hub-grpc", "hub-grpc-tcp")
NOTE = (
    f"*peer*: the speedup over `{PEER}`, or over `{TRAINED_PEER}` for whole training steps."
    f" *limit*: the row's time divided by that of `{WIRE_BOUND}` for"
    f" {', '.join(f'`{row}`' for row in OVER_WIRE)}, of `{AES_BOUND}` for `{AES_ROW}`, of the faster of"
    f" {' and '.join(f'`{row}`' for row in BOUNDS)} for the others."
    " *exposed*: the time of a step minus that of a step without exchange."
)
ON_GPU = tuple(row.name for row in ROWS.values() if row.device == "cuda")
GPU_BOUND = "bound-cuda"
LIMITS = {**dict.fromkeys(OVER_WIRE, (WIRE_BOUND,)), **dict.fromkeys(ON_GPU, (GPU_BOUND,))}
"""The limits of the rows that `BOUNDS` do not limit."""
LIMITS[AES_ROW] = (AES_BOUND,)
GPU_NOTE = f"For the rows on a GPU ({', '.join(f'`{row}`' for row in ON_GPU)}) the limit is `{GPU_BOUND}`."


def read_entries(file: Path) -> list[BenchEntry]:
    """Reads the entries of a run.

    Raises:
        ConfigError: The file cannot be read, or is not a result file of the bench.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=list[BenchEntry])
    except (OSError, msgspec.DecodeError) as cause:
        raise ConfigError(f"{file} is not a result file of ps-worker bench: {cause}") from cause
    if not found:
        raise ConfigError(f"{file} is not a result file of ps-worker bench: it has no entry")
    return found


def render(entries: Sequence[BenchEntry]) -> str:
    """Returns Markdown: a table for each shape and optimizer, then the target ratios."""
    kinds = dict.fromkeys(_kind(each) for each in entries)
    notes = [NOTE, GPU_NOTE] if any(each.row in ON_GPU for each in entries) else [NOTE]
    tables = [_table([each for each in entries if _kind(each) == kind]) for kind in kinds]
    wanted = ratio_table(entries)
    ratios = ["Targets and measured ratios:", wanted] if wanted else []
    return "\n\n".join([_setting(entries), *notes, *tables, *ratios])


def put_into(readme: Path, text: str) -> None:
    """Replaces the text between the two markers.

    Raises:
        ConfigError: The file does not have the markers.
    """
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{readme} has no place for the tables; add the lines {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _kind(entry: BenchEntry) -> tuple[str, str]:
    return entry.shape, entry.optimizer


def _setting(entries: Sequence[BenchEntry]) -> str:
    """Returns where and how the entries were measured."""
    # Results of older benches have no commit.
    places = dict.fromkeys(
        f"{each.machine}; {each.date}" + (f"; commit {each.commit}" if each.commit else "")
        for each in entries
    )
    steps = [each.steps for each in entries]
    return (
        f"Measured on {' and on '.join(places)}. Milliseconds per step: median (maximum - minimum) of"
        f" {min(steps)} to {max(steps)} steps; the rows take turns. {_wrong(entries)}."
    )


def _wrong(entries: Iterable[BenchEntry]) -> str:
    wrong = sum(each.wrong for each in entries)
    if wrong:
        return f"{wrong} ELEMENTS WRONG"
    return (
        "Every element on every rank equals the result of torch's own optimizer, up to rounding. After"
        " training, rank 0's parameters are close to those of one process, and all ranks have the same bits"
    )


def _table(entries: Sequence[BenchEntry]) -> str:
    found = {(each.row, each.n): each for each in entries}
    sizes = list(dict.fromkeys(each.n for each in entries))
    heads, cells = (TRAINED, _trained) if entries[0].samples_per_s else (EXCHANGED, _exchanged)
    titles = [title for n in sizes for title in (f"{n} worker{'s' * (n > 1)}", *heads)]
    table = [[", ".join(_kind(entries[0])), *titles]]
    for row in dict.fromkeys(each.row for each in entries):
        table.append([f"`{row}`", *(cell for n in sizes for cell in cells(found, row, n))])
    measured = [column for column in zip(*table, strict=True) if set(column[1:]) != {"-"}]
    head, *rows = zip(*measured, strict=True)
    rule = "| --- " + "| ---: " * (len(head) - 1) + "|"
    return "\n".join([_line(*head), rule, *(_line(*row) for row in rows)])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _exchanged(found: Mapping[tuple[str, int], BenchEntry], row: str, n: int) -> list[str]:
    entry = found.get((row, n))
    # A peer with one rank exchanges nothing, so there is no speedup.
    peer = found.get((PEER, n)) if n > 1 else None
    bounds = [found[limit, n] for limit in LIMITS.get(row, BOUNDS) if (limit, n) in found]
    bound = min(bounds, key=lambda each: each.median_ms, default=None)
    return [_time(entry), _ratio(peer, entry, 1), _ratio(entry, bound, 2)]


def _trained(found: Mapping[tuple[str, int], BenchEntry], row: str, n: int) -> list[str]:
    entry = found.get((row, n))
    if entry is None:
        return ["-"] * 4
    speed, exposed = f"{entry.samples_per_s:.0f}", _number(entry.exposed_ms)
    return [_time(entry), speed, exposed, _ratio(found.get((TRAINED_PEER, n)), entry, 2)]


def _time(entry: BenchEntry | None) -> str:
    return "-" if entry is None else f"{_number(entry.median_ms)} ({_number(entry.spread_ms)})"


def _ratio(entry: BenchEntry | None, to: BenchEntry | None, digits: int) -> str:
    return "-" if entry is None or to is None else f"{entry.median_ms / to.median_ms:.{digits}f}"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
