"""A cork: what is asked for while one is in leaves together."""

from __future__ import annotations

import weakref
from collections.abc import Callable

Corks = set["weakref.ref[Cork]"]
"""Those that are in."""


class Cork:
    """Holds requests back while it is entered.

    Args:
        corks: Where it is put meanwhile; as a reference, so that one that a signal's exception
            kept from being left holds nothing back once it is gone.
        let_out: Called when it was left.
    """

    def __init__(self, corks: Corks, let_out: Callable[[], None]) -> None:
        self._corks = corks
        self._let_out = let_out
        self._own = weakref.ref(self)

    def __enter__(self) -> None:
        try:
            self._corks.add(self._own)
        except BaseException:  # a signal's, come right after: nobody would leave what was not entered
            self._corks.discard(self._own)
            raise

    def __exit__(self, *_: object) -> None:
        self._corks.discard(self._own)
        self._let_out()
