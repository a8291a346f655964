"""What a process did and when, as a file that Chrome's trace viewer and Perfetto load.

The Trace Event Format's JSON array: a complete event (`ph` X) a span, `ts` and `dur`
in microseconds. `ts` counts from 1970 by this host's clock, so the files of one host
can be laid side by side as they are. Those of several can be aligned by what stands
in a metadata event (`ph` M) named `clock_offset`: `host`, the same for all processes
that share a clock; and, if there is a coordinator, `ahead_ns`, to be added for its time,
and `round_trip_ns`, half of which is the error (`hubring.ps.core.clock_offset`). Viewers skip it, and
forgive a missing end, so the file of a run that died can be read as far as it was written.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from hubring.ps.core.clock_offset import Offset
from hubring.ps.core.host_id import name_kernel

HELD = 2000
"""Spans that may wait to be written: writing each as it ends would cost more than most of them."""

CLOCK_OFFSET = "clock_offset"
_SUFFIX = ".trace.json"


class Trace:
    """Spans of one process, in rows; from any thread.

    Args:
        folder: Where `NAME.trace.json` is written; made if it is not there.
        name: The process's, as people know it.
        offset: How far the coordinator's clock is ahead; None: there is no coordinator.
    """

    def __init__(self, folder: Path, name: str, offset: Offset | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{name}{_SUFFIX}").open("w")
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._held: list[tuple[str, str, int, int]] = []
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._pid = os.getpid()
        self._file.write("[\n" + self._about("process_name", 0, name=name))
        told = {} if offset is None else {"ahead_ns": offset.ahead, "round_trip_ns": offset.round_trip}
        self._file.write(",\n" + self._about(CLOCK_OFFSET, 0, host=name_kernel(), **told))
        self._file.flush()  # whoever is killed leaves at least who it was, and by which clock

    def span(self, row: str, name: str, began: int, ended: int) -> None:
        """Notes what was done.

        Args:
            row: Where it is drawn; spans of one row lie apart or within each other.
            name: What it was.
            began: By `time.monotonic_ns`.
            ended: Likewise.
        """
        with self._lock:
            self._held.append((row, name, began, ended))
            if len(self._held) >= HELD:
                self._write()

    def close(self) -> None:
        """Writes what is left; a span that comes later is lost. A second call does nothing."""
        with self._lock:
            if self._file.closed:
                return
            self._write()
            self._file.write("\n]\n")
            self._file.close()

    def _write(self) -> None:
        if self._file.closed:
            return
        for row, name, began, ended in self._held:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                self._file.write(",\n" + self._about("thread_name", self._rows[row], name=row))
            event = {"name": name, "cat": row, "ph": "X", **self._where(self._rows[row])}
            event |= {"ts": (began + self._epoch) / 1000, "dur": (ended - began) / 1000}
            self._file.write(",\n" + json.dumps(event))
        self._held.clear()

    def _about(self, kind: str, row: int, **args: str | int) -> str:
        """A metadata event."""
        return json.dumps({"name": kind, "ph": "M", **self._where(row), "args": args})

    def _where(self, row: int) -> dict[str, Any]:
        return {"pid": self._pid, "tid": row}
