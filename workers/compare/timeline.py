"""One timeline of a run: the traces of all its processes in one file, which Perfetto loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def merge(folder: Path, into: Path) -> int:
    """Lays the traces in `folder` side by side, by name, and lets time begin with the first span.

    Args:
        folder: Holds `NAME.trace.json` for every process.
        into: The file to write.

    Returns:
        How many processes are in it; of none, nothing is written.
    """
    traces = [events(path) for path in sorted(folder.glob("*.trace.json"))]
    spans = [event["ts"] for trace in traces for event in trace if event["ph"] == "X"]
    if not spans:
        return 0
    placed = [event for number, trace in enumerate(traces) for event in _placed(trace, number, min(spans))]
    into.write_text(json.dumps({"traceEvents": placed, "displayTimeUnit": "ms"}))
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


def _placed(trace: list[Event], number: int, zero: float) -> Iterator[Event]:
    """The events of one process; processes of different hosts may have the same id, so they are numbered."""
    yield {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
    for event in trace:
        moved = {"ts": event["ts"] - zero} if event["ph"] == "X" else {}
        yield {**event, "pid": number, **moved}
