"""One timeline of a run: the traces of all its processes in one file for Perfetto, and the hosts' clocks.

Traces of several hosts are moved to the coordinator's clock by measured offsets
(`ps/core/timing.py`). Processes measure them as they begin, and on a cluster the conductor measures
them after each run, also for rows without a coordinator. All traces of a host move by the offset with the
shortest round trip, so they keep their relative times. Traces of one host do not move, so its timeline is
exact. Between hosts the error is half of that round trip plus the drift of the clocks since the measurement.
The drift is the difference of the offsets at the start and at the end of the run, if there are both.

A host without any offset, as with peers that were started by hand, keeps the times of its own clock. The
timeline marks it as unaligned.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, to_builtins

from hubring.ps.core.timing import ClockOffset
from hubring.ps.core.trace import CLOCK_OFFSET


class HostClock(Struct, frozen=True):
    """A host's clock.

    Attributes:
        name: The host's name.
        moved_us: What was added to its times, to have them on the coordinator's clock.
        error_us: Half of the round trip in which the offset was measured; None: it was not measured.
        drift_us: By how much it differed at the start and the end of the run; None: it was measured once.
    """

    name: str
    moved_us: float = 0.0
    error_us: float | None = None
    drift_us: float | None = None

    @property
    def aligned(self) -> bool:
        return self.error_us is not None

    def __str__(self) -> str:
        if self.error_us is None:
            return f"{self.name} unknown, so its processes are marked as unaligned"
        error, then = self.error_us + (self.drift_us or 0.0), " when it was measured"
        found = f"{self.name} {self.moved_us / 1e6:+.6f} s, with an error of at most {error / 1e3:.3f} ms"
        return found + then if self.drift_us is None else found


def worst_clock(runs: Iterable[Sequence[HostClock]]) -> list[HostClock]:
    """Returns the largest move, error and drift of each host over all runs with several hosts."""
    found: dict[str, HostClock] = {}
    for clock in (clock for run in runs if len(run) > 1 for clock in run):
        before = found.get(clock.name, clock)
        found[clock.name] = HostClock(
            clock.name,
            max(before.moved_us, clock.moved_us, key=abs),
            _larger(before.error_us, clock.error_us),
            _larger(before.drift_us, clock.drift_us),
        )
    return list(found.values())


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def clock_sentence(clocks: Sequence[HostClock]) -> str:
    """Returns how the hosts' clocks differ, and how certain that is; empty for one host."""
    if not clocks:
        return ""
    return f"Clocks, and what the timelines add to them: {'; '.join(map(str, clocks))}."


Event = dict[str, Any]


class _Trace(Struct, frozen=True):
    """One process: its events, its host, and the offset of its clock; None if it did not measure one."""

    events: list[Event]
    host: str
    name: str
    offset: ClockOffset | None


class Merged(NamedTuple):
    """The number of processes, and the clock of each host."""

    processes: int
    clocks: list[HostClock]


def merge(folder: Path, into: Path, measured: Mapping[str, ClockOffset] | None = None) -> Merged:
    """Merges the traces in `folder` in the order of their names. Time begins with the first span.

    The file's `otherData` holds by how much each host's traces moved, and the error. Of several hosts, the
    names of the processes contain that of the host, and a host without an offset is `unaligned` there.

    Args:
        folder: Holds `NAME.trace.json` for every process.
        into: The file to write.
        measured: Offsets by host, besides those in the traces.

    Returns:
        What was merged; without any process no file is written.
    """
    traces = [_read_trace(path) for path in sorted(folder.glob("*.trace.json"))]
    clocks = _clocks(traces, measured or {})
    several = len(clocks) > 1
    placed = [
        event
        for number, trace in enumerate(traces)
        for event in _placed(trace, number, clocks[trace.host], several)
    ]
    spans = [event for event in placed if event["ph"] == "X"]
    if not spans:
        return Merged(0, [])
    zero = min(span["ts"] for span in spans)
    for span in spans:
        span["ts"] -= zero
    about = {host: to_builtins(clock) for host, clock in clocks.items()}
    into.write_text(json.dumps({"traceEvents": placed, "displayTimeUnit": "ms", "otherData": about}))
    return Merged(len(traces), list(clocks.values()))


def events(path: Path) -> list[Event]:
    """Returns the events of one process; of a killed process, those that are complete."""
    found: list[Event] = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):  # the last line of a process that was killed
            found += [json.loads(line.rstrip().rstrip(","))] if line.startswith("{") else []
    return found


def _read_trace(path: Path) -> _Trace:
    found = events(path)
    rest = [event for event in found if event["name"] != CLOCK_OFFSET]
    noted: Mapping[str, Any] = next((event["args"] for event in found if event["name"] == CLOCK_OFFSET), {})
    compared = "ahead_ns" in noted
    offset = ClockOffset(noted["ahead_ns"], noted["round_trip_ns"]) if compared else None
    host = noted.get("host", "unknown")
    return _Trace(rest, host, noted.get("name", host), offset)


def _clocks(traces: Iterable[_Trace], measured: Mapping[str, ClockOffset]) -> Mapping[str, HostClock]:
    """Returns the clock of each host, by the offset with the shortest round trip.

    Args:
        traces: Their offsets are of the start of the run.
        measured: Offsets of its end.
    """
    names: dict[str, str] = {}
    begun: dict[str, ClockOffset] = {}
    for trace in traces:
        names.setdefault(trace.host, trace.name)
        if trace.offset is not None:
            begun[trace.host] = _shortest([trace.offset, begun.get(trace.host, trace.offset)])
    if len(names) == 1:
        return {host: HostClock(name, error_us=0.0, drift_us=0.0) for host, name in names.items()}
    often = Counter(names.values())
    return {
        host: _clock(
            name if often[name] == 1 else f"{name} ({host[:8]})",
            [offsets[host] for offsets in (begun, measured) if host in offsets],
        )
        for host, name in names.items()
    }


def _clock(name: str, offsets: Sequence[ClockOffset]) -> HostClock:
    """Returns the clock of a host with these offsets, of the start and then of the end of the run."""
    if not offsets:
        return HostClock(name)
    best = _shortest(offsets)
    drift = abs(offsets[0].ahead - offsets[-1].ahead) / 1000 if len(offsets) > 1 else None
    same = best.round_trip == 0  # it is the clock with which the others are compared
    return HostClock(name, best.ahead / 1000, best.round_trip / 2000, 0.0 if same else drift)


def _shortest(offsets: Sequence[ClockOffset]) -> ClockOffset:
    return min(offsets, key=lambda offset: offset.round_trip)


def _placed(trace: _Trace, number: int, clock: HostClock, several: bool) -> Iterator[Event]:
    """Returns the events of one process, which gets a number: process ids can repeat across hosts."""
    yield {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
    for event in trace.events:
        changed: Event = {"ts": event["ts"] + clock.moved_us} if event["ph"] == "X" else {}
        if several and event["name"] == "process_name":
            place = clock.name if clock.aligned else f"{clock.name} (unaligned)"
            changed = {"args": {"name": f"{event['args']['name']} on {place}"}}
        yield {**event, "pid": number, **changed}
