"""A hook on a module that its copies do not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook that a module calls, before its forward for example.

    Copying or pickling a module copies its hooks. The copy has its own parameters, which are not
    exchanged, so the copied hook does nothing.

    Args:
        act: Called with all that torch passes to the hook.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: object) -> None:
        self._act(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*_: object) -> None:
    """Does nothing."""
