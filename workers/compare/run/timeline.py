"""One timeline of a run: the traces of all its processes in one file, which Perfetto loads.

Traces of several hosts are put on the coordinator's clock, each by what it notes of its own
(`ps/core/clock_offset.py`). Of all traces of one host the measurement with the shortest round trip moves them
all, so that they stay as they were to each other, and one that cannot tell the two clocks apart moves
nothing: the timeline of one host is exact. Between hosts it is true to half of that round trip, and to what
the clocks have drifted since the processes began.

Where there is no coordinator, as in other people's rows, nobody compared clocks. One host has no need to; of
several, those that did not stay where their own clocks put them, and the timeline says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hubring.ps.core.clock_offset import Offset
from hubring.ps.core.trace import CLOCK_OFFSET

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Trace:
    """One process: its events, and by whose clock; without an offset it did not compare its own."""

    events: list[Event]
    host: str
    offset: Offset | None


def merge(folder: Path, into: Path) -> int:
    """Lays the traces in `folder` side by side, by name, and lets time begin with the first span.

    The file's `otherData` tells by how much each host's were moved, and how far that may be off. A host
    beside others that did not compare its clock is `unaligned` there, and so its processes' names end.

    Args:
        folder: Holds `NAME.trace.json` for every process.
        into: The file to write.

    Returns:
        How many processes are in it; of none, nothing is written.
    """
    traces = [_read(path) for path in sorted(folder.glob("*.trace.json"))]
    offsets = _by_host(traces)
    hosts = list(dict.fromkeys(trace.host for trace in traces))
    unaligned = [host for host in hosts if host not in offsets] if len(hosts) > 1 else []
    moved = {host: offset.ahead / 1000 if offset.certain else 0.0 for host, offset in offsets.items()}
    placed = [
        event
        for number, trace in enumerate(traces)
        for event in _placed(trace, number, moved.get(trace.host, 0.0), trace.host in unaligned)
    ]
    spans = [event for event in placed if event["ph"] == "X"]
    if not spans:
        return 0
    zero = min(span["ts"] for span in spans)
    for span in spans:
        span["ts"] -= zero
    told: dict[str, dict[str, Any]] = {
        host: {"moved_us": moved[host], "error_us": offset.round_trip / 2000}
        for host, offset in offsets.items()
    }
    told |= {host: {"moved_us": 0.0, "error_us": None, "unaligned": True} for host in unaligned}
    into.write_text(json.dumps({"traceEvents": placed, "displayTimeUnit": "ms", "otherData": told}))
    return len(traces)


def events(path: Path) -> list[Event]:
    """The events of one process; of one that was killed, those that it had written whole."""
    lines = (line.rstrip().rstrip(",") for line in path.read_text().splitlines())
    return [event for line in lines if line.startswith("{") and (event := _whole(line)) is not None]


def _whole(line: str) -> Event | None:
    try:
        event: Event = json.loads(line)
    except ValueError:  # the last line of a process that was killed
        return None
    return event


def _read(path: Path) -> _Trace:
    found = events(path)
    rest = [event for event in found if event["name"] != CLOCK_OFFSET]
    noted: Mapping[str, Any] = next((event["args"] for event in found if event["name"] == CLOCK_OFFSET), {})
    compared = "ahead_ns" in noted
    offset = Offset(noted["ahead_ns"], noted["round_trip_ns"]) if compared else None
    return _Trace(rest, noted.get("host", "unknown"), offset)


def _by_host(traces: Iterable[_Trace]) -> Mapping[str, Offset]:
    """The best of each host's; a host where nobody compared has none."""
    best: dict[str, Offset] = {}
    for host, offset in ((trace.host, trace.offset) for trace in traces):
        if offset is not None and (host not in best or offset.round_trip < best[host].round_trip):
            best[host] = offset
    return best


def _placed(trace: _Trace, number: int, ahead: float, unaligned: bool) -> Iterator[Event]:
    """The events of one process; processes of different hosts may have the same id, so they are numbered."""
    yield {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
    for event in trace.events:
        changed: Event = {"ts": event["ts"] + ahead} if event["ph"] == "X" else {}
        if unaligned and event["name"] == "process_name":
            changed = {"args": {"name": f"{event['args']['name']} (unaligned)"}}
        yield {**event, "pid": number, **changed}
