"""Numbers that launchers put into environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hubring.ps.core.errors import ConfigError

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """One number and its source.

    Attributes:
        field: A field of `Placement`: rank, size, local_rank, local_size, node_rank, nodes or restart.
        value: The number.
        source: `NAME=value`, the flag and its value, or the hostname.
    """

    field: str
    value: int
    source: str


@dataclass(frozen=True, slots=True)
class Family:
    """Launchers that set the same variables.

    Attributes:
        name: The value of `Placement.launcher`.
        names: Every variable that the family reads.
        started: Whether the variables show that this family started the process.
        read: Returns the numbers in the variables.
        note: What the family does not provide, for `ps-worker env --explain`.
    """

    name: str
    names: tuple[str, ...]
    started: Callable[[Environment], bool]
    read: Callable[[Environment], list[Reading]]
    note: str = ""


def read(environment: Environment, names: Mapping[str, str]) -> list[Reading]:
    """Returns the numbers in these variables (field to variable name), without those that are not set.

    Raises:
        ConfigError: A variable holds no number.
    """
    return [
        Reading(field, number(name, environment[name]), f"{name}={environment[name]}")
        for field, name in names.items()
        if name in environment
    ]


def number(name: str, text: str) -> int:
    """Parses a whole number of 0 or more.

    Raises:
        ConfigError: The text is not such a number.
    """
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise ConfigError(f"{name}={text!r}: expected a whole number of 0 or more; unset or correct {name}")
    return int(text)
