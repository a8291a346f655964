"""A batch holds requests back until it closes, so that they leave together."""

from __future__ import annotations

import weakref
from collections.abc import Callable

Batches = set["weakref.ref[Batch]"]
"""The open batches."""


class Batch:
    """Holds requests back while it is open.

    Args:
        batches: The open batches. Holds weak references: if an exception from a signal handler skips
            `__exit__`, the batch stops holding requests back once it is garbage-collected.
        on_exit: Called when the batch closes.
    """

    def __init__(self, batches: Batches, on_exit: Callable[[], None]) -> None:
        self._batches = batches
        self._on_exit = on_exit
        self._own = weakref.ref(self)

    def __enter__(self) -> None:
        try:
            self._batches.add(self._own)
        except BaseException:  # raised by a signal handler after `add`: `__exit__` does not run
            self._batches.discard(self._own)
            raise

    def __exit__(self, *_: object) -> None:
        self._batches.discard(self._own)
        self._on_exit()
