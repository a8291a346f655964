"""Running operations, by the handles that the `..._async` functions return.

`synchronize`, or a `poll` that returns True, computes the result and writes the tensor of an in-place
operation. Two running operations cannot have the same name, since the other ranks could not distinguish
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hubring.ps.core.work import Work
from hubring.workers.horovod.errors import translated


@dataclass(slots=True)
class Pending:
    """One operation of one or more exchanges; `finish` computes the result from their results."""

    name: str
    works: Sequence[Work]
    finish: Callable[[], Any]
    _results: list[Any] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(work.done for work in self.works)

    def result(self) -> Any:
        """Waits for the operation, and returns its result.

        Raises:
            HorovodInternalError: The operation failed.
        """
        if not self._results:
            with translated():
                for work in self.works:
                    work.wait()
            self._results.append(self.finish())
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
        if earlier is not None and not earlier.done:
            raise ValueError(
                f"an operation named {name!r} is running; call synchronize() first, or use another name"
            )

    def add(self, pending: Pending) -> int:
        """Stores an operation, and returns its handle."""
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = self._by_name[pending.name] = pending
        return number

    def poll(self, handle: int) -> bool:
        """Whether the operation has ended. If so, writes the tensors of an in-place operation.

        Raises:
            ValueError: The handle is unknown, or was synchronized before.
        """
        pending = self._pending.get(handle)
        if pending is None:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        if pending.done and not any(work.error for work in pending.works):
            pending.result()
        return pending.done

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
