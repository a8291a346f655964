"""Operations under way, by the numbers that `..._async` functions return.

A result is taken, and an in-place operation's tensor written, by `synchronize`,
or by a `poll` that tells that the operation is over. No two operations under
way may have one name: nobody could tell which of them the other ranks mean.
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
    """One operation, of one or more exchanges; `finish` makes its result of what they brought."""

    name: str
    works: Sequence[Work]
    finish: Callable[[], Any]
    _results: list[Any] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(work.done for work in self.works)

    def result(self) -> Any:
        """What it brought; waits for it.

        Raises:
            HorovodInternalError: What it failed with.
        """
        if not self._results:
            with translated():
                for work in self.works:
                    work.wait()
            self._results.append(self.finish())
        return self._results[0]


class Handles:
    """The operations of one rank that nobody has synchronised yet."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, Pending] = {}
        self._by_name: dict[str, Pending] = {}
        self._lock = threading.Lock()

    def check_free(self, name: str) -> None:
        """Refuses a second operation of a name that is under way.

        Raises:
            ValueError: There is one.
        """
        earlier = self._by_name.get(name)
        if earlier is not None and not earlier.done:
            raise ValueError(
                f"an operation named {name!r} is under way: synchronize() it first, or take another name"
            )

    def add(self, pending: Pending) -> int:
        """Keeps an operation; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = self._by_name[pending.name] = pending
        return number

    def poll(self, handle: int) -> bool:
        """Whether `synchronize` would return at once; if so, tensors that it writes in place are written.

        Raises:
            ValueError: There is no such operation, or it was synchronised.
        """
        pending = self._pending.get(handle)
        if pending is None:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        if pending.done and not any(work.error for work in pending.works):
            pending.result()
        return pending.done

    def synchronize(self, handle: int) -> Any:
        """Waits for an operation and returns its result; None for a handle that is not under way.

        Raises:
            HorovodInternalError: What the operation failed with.
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
