"""The tables of RESULTS.md, rendered from the bench's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hubring.ps.core.errors import ConfigError
from hubring.workers.bench.report import ratios
from hubring.workers.bench.report.ratios import BOUNDS, Entry
from hubring.workers.bench.rows.row import ROWS

BEGIN, END = "<!-- made by ps-worker bench --summary -->", "<!-- until here -->"
PEER = "gloo+sgd"
WIRE_BOUND = "raw-tcp"
TRAINED_PEER = "ddp-gloo"
EXCHANGED = ("peer", "limit")
TRAINED = ("samples/s", "exposed ms", "peer")
OVER_WIRE = ("hub-zmq", "hub-zmq-bf16", "hub-zmq-int8", "hub-grpc")
NOTE = (
    f"*peer*: the speedup over `{PEER}`, or over `{TRAINED_PEER}` for whole training steps."
    f" *limit*: the row's time divided by the time of the limit, which is `{WIRE_BOUND}` for"
    f" {', '.join(f'`{row}`' for row in OVER_WIRE)}, and the faster of"
    f" {' and '.join(f'`{row}`' for row in BOUNDS)} for the other rows."
    " *exposed*: the time of a step minus the time of a step without exchange."
)
ON_GPU = tuple(row.name for row in ROWS.values() if row.device == "cuda")
GPU_BOUND = "bound-cuda"
GPU_NOTE = f"For the rows on a GPU ({', '.join(f'`{row}`' for row in ON_GPU)}) the limit is `{GPU_BOUND}`."

WANTED = "Targets and measured ratios:"


def read(file: Path) -> list[Entry]:
    """Reads the entries of a run.

    Raises:
        ConfigError: The file cannot be read, or is not a result file of the bench.
    """
    try:
        found: list[Entry] = json.loads(file.read_text())
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{file} is not a result file of ps-worker bench: {cause}") from cause
    if not found or not all("median_ms" in each for each in found):
        raise ConfigError(f"{file} is not a result file of ps-worker bench: an entry has no median_ms")
    return found


def render(entries: Sequence[Entry]) -> str:
    """Returns Markdown: a table for each shape and optimizer, then the target ratios."""
    kinds = dict.fromkeys(_kind(each) for each in entries)
    notes = [NOTE, GPU_NOTE] if any(each["row"] in ON_GPU for each in entries) else [NOTE]
    tables = [_table([each for each in entries if _kind(each) == kind]) for kind in kinds]
    wanted = ratios.table(entries)
    return "\n\n".join([_setting(entries), *notes, *tables, *([WANTED, wanted] if wanted else [])])


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


def _kind(entry: Entry) -> tuple[str, str]:
    return entry["shape"], entry["optimizer"]


def _setting(entries: Sequence[Entry]) -> str:
    """Returns where and how the entries were measured."""
    places = dict.fromkeys(f"{each['machine']}; {each['date']}{_commit(each)}" for each in entries)
    steps = [each["steps"] for each in entries]
    return (
        f"Measured on {' and on '.join(places)}. Milliseconds per step: median (maximum - minimum) of"
        f" {min(steps)} to {max(steps)} steps; the rows take turns. {_wrong(entries)}."
    )


def _wrong(entries: Iterable[Entry]) -> str:
    wrong = sum(each["wrong"] for each in entries)
    if wrong:
        return f"{wrong} ELEMENTS WRONG"
    return (
        "On every rank every element equals the result of torch's own optimizer on the mean gradient, up to"
        " rounding. After training, rank 0's parameters are close to those of one process, and all ranks have"
        " the same bits"
    )


def _commit(entry: Entry) -> str:
    """Returns the commit as a clause; empty for results of older benches, which have none."""
    commit = entry.get("commit", "")
    return f"; commit {commit}" if commit else ""


def _table(entries: Sequence[Entry]) -> str:
    found = {(each["row"], each["n"]): each for each in entries}
    sizes = list(dict.fromkeys(each["n"] for each in entries))
    heads, cells = (TRAINED, _trained) if entries[0]["samples_per_s"] else (EXCHANGED, _exchanged)
    titles = [title for n in sizes for title in (f"{n} worker{'s' * (n > 1)}", *heads)]
    lines = [_line(", ".join(_kind(entries[0])), *titles), "| --- " + "| ---: " * len(titles) + "|"]
    for row in dict.fromkeys(each["row"] for each in entries):
        lines.append(_line(f"`{row}`", *(cell for n in sizes for cell in cells(found, row, n))))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _exchanged(found: Mapping[tuple[str, int], Entry], row: str, n: int) -> list[str]:
    entry = found.get((row, n))
    # A peer with one rank exchanges nothing, so there is no speedup.
    peer = found.get((PEER, n)) if n > 1 else None
    limits = (WIRE_BOUND,) if row in OVER_WIRE else (GPU_BOUND,) if row in ON_GPU else BOUNDS
    bounds = [found[limit, n] for limit in limits if (limit, n) in found]
    bound = min(bounds, key=lambda each: each["median_ms"], default=None)
    return [_time(entry), _ratio(peer, entry, 1), _ratio(entry, bound, 2)]


def _trained(found: Mapping[tuple[str, int], Entry], row: str, n: int) -> list[str]:
    entry = found.get((row, n))
    if entry is None:
        return ["-"] * 4
    speed, exposed = f"{entry['samples_per_s']:.0f}", _number(entry["exposed_ms"])
    return [_time(entry), speed, exposed, _ratio(found.get((TRAINED_PEER, n)), entry, 2)]


def _time(entry: Entry | None) -> str:
    return "-" if entry is None else f"{_number(entry['median_ms'])} ({_number(entry['spread_ms'])})"


def _ratio(entry: Entry | None, to: Entry | None, digits: int) -> str:
    return "-" if entry is None or to is None else f"{entry['median_ms'] / to['median_ms']:.{digits}f}"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
