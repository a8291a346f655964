"""The tables in the README, made from the bench's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ps.errors import ConfigError

BEGIN, END = "<!-- made by ps-worker bench --summary -->", "<!-- until here -->"
PEER = "gloo+sgd"
BOUND, WIRE_BOUND = "bound-memory", "raw-tcp"
OVER_WIRE = ("hub-zmq", "hub-grpc")
NOTE = (
    f"*peer*: how many times faster than `{PEER}` a row is. *limit*: its time divided by the limit's, that"
    f" is by `{WIRE_BOUND}` for {' and '.join(f'`{row}`' for row in OVER_WIRE)}, by `{BOUND}` for all others."
)

Entry = Mapping[str, Any]
"""An object of the bench's JSON; `workers.bench.table.Entry` says what its fields mean."""


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
    """Markdown: a table for every shape and optimizer, one column group for every number of ranks."""
    kinds = dict.fromkeys((each["shape"], each["optimizer"]) for each in entries)
    tables = [_table([each for each in entries if _kind(each) == kind]) for kind in kinds]
    return "\n\n".join([_setting(entries), *tables, NOTE])


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
    places = dict.fromkeys(f"{each['machine']}; {each['date']}" for each in entries)
    steps = sorted({each["steps"] for each in entries})
    shards = max(each["shards"] for each in entries)
    return (
        f"Measured on {' and on '.join(places)}. Milliseconds a step as median (maximum - minimum) of"
        f" {' or '.join(map(str, steps))} steps, rows taking turns; hubs of {shards} shards at most;"
        f" {_wrong(entries)}."
    )


def _wrong(entries: Iterable[Entry]) -> str:
    wrong = sum(each["wrong"] for each in entries)
    return f"{wrong} ELEMENTS WRONG" if wrong else "every element checked, none wrong"


def _table(entries: Sequence[Entry]) -> str:
    found = {(each["row"], each["n"]): each for each in entries}
    sizes = list(dict.fromkeys(each["n"] for each in entries))
    shape, optimizer = _kind(entries[0])
    heads = [f"{n} worker{'s' * (n > 1)} | peer | limit" for n in sizes]
    rule = "| --- " + "| ---: " * 3 * len(sizes) + "|"
    lines = [f"| {shape}, {optimizer} | {' | '.join(heads)} |", rule]
    for row in dict.fromkeys(each["row"] for each in entries):
        cells = [cell for n in sizes for cell in _cells(found, row, n)]
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(found: Mapping[tuple[str, int], Entry], row: str, n: int) -> list[str]:
    entry = found.get((row, n))
    if entry is None:
        return ["-"] * 3
    time = f"{_number(entry['median_ms'])} ({_number(entry['spread_ms'])})"
    peer = found.get((PEER, n))
    bound = found.get((WIRE_BOUND if row in OVER_WIRE else BOUND, n))
    # One rank alone exchanges nothing in a peer, so there is nothing to be faster than.
    faster = "-" if peer is None or n == 1 else f"{peer['median_ms'] / entry['median_ms']:.1f}"
    return [time, faster, "-" if bound is None else f"{entry['median_ms'] / bound['median_ms']:.2f}"]


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
