"""The tables in RESULTS.md, made from the bench's JSON."""

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
    f"*peer*: how many times faster than `{PEER}` a row is, or than `{TRAINED_PEER}` where whole steps of"
    " training are timed. *limit*: its time divided by the limit's, that is by"
    f" `{WIRE_BOUND}` for {', '.join(f'`{row}`' for row in OVER_WIRE)}, by the faster of"
    f" {' and '.join(f'`{row}`' for row in BOUNDS)} for all others."
    " *exposed*: what a step takes beyond computing."
)
ON_GPU = tuple(row.name for row in ROWS.values() if row.device == "cuda")
GPU_BOUND = "bound-cuda"
GPU_NOTE = f"On a GPU *limit* is by `{GPU_BOUND}`: for {', '.join(f'`{row}`' for row in ON_GPU)}."

WANTED = "What is wanted of these times, and what came of it:"


def read(file: Path) -> list[Entry]:
    """The entries of a run.

    Raises:
        ConfigError: The file holds something else.
    """
    try:
        found: list[Entry] = json.loads(file.read_text())
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{file} is not what ps-worker bench wrote: {cause}") from cause
    if not found or not all("median_ms" in each for each in found):
        raise ConfigError(f"{file} is not what ps-worker bench wrote: it holds no entry with median_ms")
    return found


def render(entries: Sequence[Entry]) -> str:
    """Markdown: for every shape and optimizer a table with columns for every number of ranks; then ratios."""
    kinds = dict.fromkeys(_kind(each) for each in entries)
    notes = [NOTE, GPU_NOTE] if any(each["row"] in ON_GPU for each in entries) else [NOTE]
    tables = [_table([each for each in entries if _kind(each) == kind]) for kind in kinds]
    wanted = ratios.table(entries)
    return "\n\n".join([_setting(entries), *notes, *tables, *([WANTED, wanted] if wanted else [])])


def put_into(readme: Path, text: str) -> None:
    """Replaces what stands between the two markers.

    Raises:
        ConfigError: The file has no such place.
    """
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{readme} has no place for the tables: it needs the lines {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _kind(entry: Entry) -> tuple[str, str]:
    return entry["shape"], entry["optimizer"]


def _setting(entries: Sequence[Entry]) -> str:
    """Where and how it was measured, each fact once."""
    places = dict.fromkeys(f"{each['machine']}; {each['date']}{_commit(each)}" for each in entries)
    steps = [each["steps"] for each in entries]
    return (
        f"Measured on {' and on '.join(places)}. Milliseconds a step as median (maximum - minimum) of"
        f" {min(steps)} to {max(steps)} steps, rows taking turns; {_wrong(entries)}."
    )


def _wrong(entries: Iterable[Entry]) -> str:
    wrong = sum(each["wrong"] for each in entries)
    if wrong:
        return f"{wrong} ELEMENTS WRONG"
    return (
        "every element on every rank is what torch's own optimizer makes of the mean, up to rounding; trained"
        " ones are near what one process comes to on rank 0, bit for bit the same on all"
    )


def _commit(entry: Entry) -> str:
    """Results of older benches have none."""
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
    # One rank alone exchanges nothing in a peer, so there is nothing to be faster than.
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
