"""Running operations, by the handles that `..._async` functions return, and their timeline.

`synchronize`, or a `poll` that returns True, computes the result and writes the tensor of an in-place
operation. Two running operations cannot have the same name, since the other ranks could not distinguish
them.

The timeline is for Chrome's trace viewer and Perfetto. The format is the Trace Event Format's JSON array:
one process, one row per tensor name, and complete events (`ph` X; `ts` and `dur` in microseconds). On a
ring, NEGOTIATE_ALLREDUCE and the like last from this rank's call until all ranks have called, and ALLREDUCE
from there to the end. On a hub only the server knows that moment, so ALLREDUCE begins at the call. The file
is written line by line, and the viewers accept a missing end. So the file of a crashed run is readable too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hubring.workers.communicators.base import CollectiveWork
from hubring.workers.horovod.errors import translated


@dataclass(slots=True)
class Pending:
    """One operation; `finish` computes its result from that of the exchange."""

    name: str
    work: CollectiveWork
    finish: Callable[[Any], Any]
    _results: list[Any] = field(default_factory=list)

    def result(self) -> Any:
        """Waits for the operation, and returns its result.

        Raises:
            HorovodInternalError: The operation failed.
        """
        if not self._results:
            with translated():
                result = self.work.get()
            self._results.append(self.finish(result))
        return self._results[0]


class Handles:
    """The operations of one rank that are not synchronized yet."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, Pending] = {}
        self._by_name: dict[str, Pending] = {}
        self._lock = threading.Lock()

    def check_free(self, name: str) -> None:
        """Checks that no running operation has this name.

        Raises:
            ValueError: A running operation has this name.
        """
        earlier = self._by_name.get(name)
        if earlier is not None and not earlier.work.done:
            raise ValueError(
                f"an operation named {name!r} is running; call synchronize() first, or use another name"
            )

    def add(self, pending: Pending) -> int:
        """Stores an operation, and returns its handle."""
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = self._by_name[pending.name] = pending
        return number

    def write(self, handle: int, tensors: Any) -> None:
        """Makes an operation write its results into the tensor or tensors, and return these."""
        pending = self._pending[handle]
        finish = pending.finish
        pending.finish = lambda result: written(tensors, finish(result))

    def poll(self, handle: int) -> bool:
        """Whether the operation has ended. If so, writes the tensors of an in-place operation.

        Raises:
            ValueError: The handle is unknown, or was synchronized before.
        """
        pending = self._pending.get(handle)
        if pending is None:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        if pending.work.done and not pending.work.error:
            pending.result()
        return pending.work.done

    def synchronize(self, handle: int) -> Any:
        """Waits for an operation, and returns its result; None for an unknown or synchronized handle.

        Raises:
            HorovodInternalError: The operation failed.
        """
        with self._lock:
            pending = self._pending.pop(handle, None)
        if pending is None:
            return None
        try:
            return pending.result()
        finally:
            with self._lock:
                if self._by_name.get(pending.name) is pending:
                    del self._by_name[pending.name]


def written(tensors: Any, results: Any) -> Any:
    """Overwrites a tensor, or each of several, outside of autograd; returns it, or a tuple of them.

    A tensor can be a parameter.
    """
    if not isinstance(tensors, torch.Tensor):
        return tuple(map(written, tensors, results))
    tensors.detach().copy_(results.reshape(tensors.shape))
    return tensors


class Timeline:
    """Writes the operations of rank 0 to a file until `close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._open = True
        self._began = time.perf_counter_ns()
        self._file.write("[\n")
        process = {"name": "rank 0", "start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._write({"name": "process_name", "ph": "M", "pid": os.getpid(), "args": process})

    def follow(self, kind: str, name: str, work: CollectiveWork, called: int) -> None:
        """Follows an operation that was called at `called`; its events are written when it ends."""

        def ended(_: object) -> None:
            with self._lock:
                if not self._open:
                    return
                began = called if work.began is None else work.began
                if work.began is not None:
                    negotiated = f"negotiate_{kind.removeprefix('grouped_')}"
                    self._note(negotiated, name, self._time(called), self._time(began))
                self._note(kind, name, self._time(began), self._now())

        work.when_done(ended)

    def close(self) -> None:
        """Ends the file. Operations that have not ended are not in it."""
        with self._lock:
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
        return self._time(time.perf_counter_ns())

    def _time(self, moment: int) -> float:
        return (moment - self._began) / 1000
