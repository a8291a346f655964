"""One timeline of a run: the traces of all its processes in one file for Perfetto.

Traces of several hosts are moved to the coordinator's clock by the offsets that their processes measured
(`ps/core/clock_offset.py`). All traces of a host move by the offset with the shortest round trip, so they
keep their relative times. An offset that is smaller than its error moves nothing, so the timeline of one
host is exact. Between hosts the error is half of that round trip plus the drift of the clocks since the
processes began.

Without a coordinator, as with peers, no process measures an offset. Several hosts then keep the times of
their own clocks, and the timeline marks them as unaligned.
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
    """One process: its events, its host, and the offset of its clock; None if it did not measure one."""

    events: list[Event]
    host: str
    offset: Offset | None


def merge(folder: Path, into: Path) -> int:
    """Merges the traces in `folder` in the order of their names. Time begins with the first span.

    The file's `otherData` holds by how much each host's traces moved, and the error. A host without an
    offset, among several, is `unaligned` there and in the names of its processes.

    Args:
        folder: Holds `NAME.trace.json` for every process.
        into: The file to write.

    Returns:
        The number of processes; with 0, no file is written.
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
    clocks: dict[str, dict[str, Any]] = {
        host: {"moved_us": moved[host], "error_us": offset.round_trip / 2000}
        for host, offset in offsets.items()
    }
    clocks |= {host: {"moved_us": 0.0, "error_us": None, "unaligned": True} for host in unaligned}
    into.write_text(json.dumps({"traceEvents": placed, "displayTimeUnit": "ms", "otherData": clocks}))
    return len(traces)


def events(path: Path) -> list[Event]:
    """Returns the events of one process; of a killed process, those that are complete."""
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
    """Returns the best offset of each host that has one."""
    best: dict[str, Offset] = {}
    for host, offset in ((trace.host, trace.offset) for trace in traces):
        if offset is not None and (host not in best or offset.round_trip < best[host].round_trip):
            best[host] = offset
    return best


def _placed(trace: _Trace, number: int, ahead: float, unaligned: bool) -> Iterator[Event]:
    """Returns the events of one process, which gets a number: process ids can repeat across hosts."""
    yield {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
    for event in trace.events:
        changed: Event = {"ts": event["ts"] + ahead} if event["ph"] == "X" else {}
        if unaligned and event["name"] == "process_name":
            changed = {"args": {"name": f"{event['args']['name']} (unaligned)"}}
        yield {**event, "pid": number, **changed}
