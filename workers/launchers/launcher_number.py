"""One number that a launcher gave, and the family that knows where to look for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hubring.ps.core.errors import ConfigError

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """One number and where it stood.

    Attributes:
        field: Of `Placement`: rank, size, local_rank, local_size, node_rank, nodes or restart.
        value: The number.
        source: `NAME=value` as it stood there.
    """

    field: str
    value: int
    source: str


@dataclass(frozen=True, slots=True)
class Family:
    """Launchers that speak alike.

    Attributes:
        name: What the placement calls it.
        names: Every variable that is looked at.
        started: Whether it started this process, as far as the variables betray it.
        read: What it says.
        note: What cannot be known from it, for `ps-worker env --explain`.
    """

    name: str
    names: tuple[str, ...]
    started: Callable[[Environment], bool]
    read: Callable[[Environment], list[Reading]]
    note: str = ""


def read(environment: Environment, names: Mapping[str, str]) -> list[Reading]:
    """The numbers among these variables, by field.

    Raises:
        ConfigError: One holds no number; names it.
    """
    return [
        Reading(field, number(name, environment[name]), f"{name}={environment[name]}")
        for field, name in names.items()
        if name in environment
    ]


def number(name: str, text: str) -> int:
    """Reads a whole number of 0 or more.

    Raises:
        ConfigError: It is none; names the variable.
    """
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise ConfigError(f"{name}={text!r} is no whole number of 0 or more; unset it or correct it")
    return int(text)
