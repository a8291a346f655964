"""A batch: what is asked for while one is open leaves together."""

from __future__ import annotations

import weakref
from collections.abc import Callable

Batches = set["weakref.ref[Batch]"]
"""Those that are open."""


class Batch:
    """Holds requests back while it is entered.

    Args:
        batches: Where it is put meanwhile; as a reference, so that one that a signal's exception
            kept from being left holds nothing back once it is gone.
        let_out: Called when it was left.
    """

    def __init__(self, batches: Batches, let_out: Callable[[], None]) -> None:
        self._batches = batches
        self._let_out = let_out
        self._own = weakref.ref(self)

    def __enter__(self) -> None:
        try:
            self._batches.add(self._own)
        except BaseException:  # a signal's, come right after: nobody would leave what was not entered
            self._batches.discard(self._own)
            raise

    def __exit__(self, *_: object) -> None:
        self._batches.discard(self._own)
        self._let_out()
