"""Counts the time that recording takes, because it is part of every step that is measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class Costly(Protocol):
    """An object whose calls cost time.

    Attributes:
        seconds: The time of all counted calls so far.
    """

    seconds: float


C = TypeVar("C", bound=Costly)


def counted(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Adds the time of each call to the `seconds` of its object. Counted methods must not call each other."""

    @functools.wraps(method)
    def timed(self: C, *args: P.args, **kwargs: P.kwargs) -> T:
        began = perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += perf_counter() - began

    return cast("Callable[Concatenate[C, P], T]", timed)
