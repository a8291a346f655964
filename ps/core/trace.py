"""Writes a process's trace as a file for Chrome's trace viewer and Perfetto.

The file is a JSON array in the Trace Event Format. See the class `Trace`. Traces of processes on one
kernel share its name, the boot id, so that a viewer can tell which clocks agree.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from hubring.ps.core.timing import ClockOffset

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name_kernel() -> str:
    """Returns an id that all processes on one kernel share, in containers too.

    Falls back to the host name if the kernel has no boot id.
    """
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()


BUFFERED_SPANS = 2000
"""Spans to buffer. Writing each span as it ends would cost more than most spans."""

CLOCK_OFFSET = "clock_offset"
_SUFFIX = ".trace.json"


class Trace:
    """The spans of one process, in rows. Safe from any thread.

    Args:
        folder: Where `NAME.trace.json` is written. Created if it does not exist.
        name: The process's display name.
        offset: How far the coordinator's clock is ahead; None without a coordinator.
    """

    def __init__(self, folder: Path, name: str, offset: ClockOffset | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{name}{_SUFFIX}").open("w")
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._buffer: list[tuple[str, str, int, int]] = []
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._pid = os.getpid()
        self._file.write("[\n" + self._about("process_name", 0, name=name))
        measured = {} if offset is None else {"ahead_ns": offset.ahead, "round_trip_ns": offset.round_trip}
        host = {"host": name_kernel(), "name": socket.gethostname()}
        self._file.write(",\n" + self._about(CLOCK_OFFSET, 0, **host, **measured))
        self._file.flush()  # a killed process leaves at least its name and clock

    def span(self, row: str, name: str, began: int, ended: int) -> None:
        """Records a span.

        Args:
            row: The row to draw it in. Spans of one row must not overlap, but can be nested.
            name: The span's name.
            began: Start, by `time.monotonic_ns`.
            ended: End, by `time.monotonic_ns`.
        """
        with self._lock:
            self._buffer.append((row, name, began, ended))
            if len(self._buffer) >= BUFFERED_SPANS:
                self._write()

    def close(self) -> None:
        """Writes the buffered spans. Later spans are lost. A second call does nothing."""
        with self._lock:
            if self._file.closed:
                return
            self._write()
            self._file.write("\n]\n")
            self._file.close()

    def _write(self) -> None:
        if self._file.closed:
            return
        for row, name, began, ended in self._buffer:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                self._file.write(",\n" + self._about("thread_name", self._rows[row], name=row))
            event = {"name": name, "cat": row, "ph": "X", **self._where(self._rows[row])}
            event |= {"ts": (began + self._epoch) / 1000, "dur": (ended - began) / 1000}
            self._file.write(",\n" + json.dumps(event))
        self._buffer.clear()

    def _about(self, kind: str, row: int, **args: str | int) -> str:
        """Formats a metadata event."""
        return json.dumps({"name": kind, "ph": "M", **self._where(row), "args": args})

    def _where(self, row: int) -> dict[str, Any]:
        return {"pid": self._pid, "tid": row}
