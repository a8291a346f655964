"""Writes the start and the end of each operation to a file for Chrome's trace viewer and Perfetto.

The format is the Trace Event Format's JSON array: one process, one row per tensor name, and one complete
event (`ph` X; `ts` and `dur` in microseconds) from an operation's call to its end. The file is written line
by line, and the viewers accept a missing end. So the file of a crashed run is readable too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from hubring.ps.core.work import Work


class Timeline:
    """Writes this rank's operations to a file until `close`."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file = path.open("w")
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._open = True
        self._began = time.perf_counter_ns()
        self._file.write("[\n")
        process = {"name": f"rank {rank}", "start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._write({"name": "process_name", "ph": "M", "pid": os.getpid(), "args": process})

    def follow(self, kind: str, name: str, works: list[Work]) -> None:
        """Follows an operation that starts now; its event is written when all of its exchanges end."""
        began, left = self._now(), [len(works)]

        def ended(_: Work) -> None:
            with self._lock:
                left[0] -= 1
                if left[0] == 0 and self._open:
                    self._note(kind, name, began, self._now())

        for work in works:
            work.when_done(ended)

    def close(self) -> None:
        """Ends the file. Operations that have not ended are not in it."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._file.write(json.dumps({"name": "end", "ph": "i", "s": "g", **self._where(0)}) + "\n]\n")
            self._file.close()

    def _note(self, kind: str, name: str, began: float, ended: float) -> None:
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            title = {"name": "thread_name", "ph": "M", "args": {"name": name}}
            self._write({**title, **self._where(self._rows[name])})
        row = self._rows[name]
        event = {"name": kind.upper(), "cat": "collective", "ph": "X", **self._where(row)}
        self._write({**event, "ts": began, "dur": max(0.0, ended - began), "args": {"tensor": name}})

    def _where(self, row: int) -> dict[str, Any]:
        return {"pid": os.getpid(), "tid": row, "ts": self._now()}

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")
        self._file.flush()

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._began) / 1000
