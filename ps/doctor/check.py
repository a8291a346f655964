"""A check: what looks at one part of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hubring.ps.doctor.finding import Finding


class Check(NamedTuple):
    """One of them; runs in a process of its own, where it may crash or hang.

    Attributes:
        name: Of its only finding, or of the first.
        examine: Looks, and tells finding by finding, so that what it told before it crashed is known.
        mend: What to try where it crashes or hangs, as a command.
        further: Names of what it comes to later, which is told as left out where it does not.
    """

    name: str
    examine: Callable[[], Iterable[Finding]]
    mend: str
    further: tuple[str, ...] = ()
