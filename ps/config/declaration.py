"""Declares a setting once: a field of a config, with a `Flag` in its type.

    lease: Annotated[Seconds, cluster("seconds without a heartbeat before a worker is lost")] = 90.0

The field defines `--lease`, `PS_LEASE`, `lease` in TOML, the line in `--help` and the row in
deploy/SETTINGS.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

from msgspec import Struct
from msgspec.structs import FieldInfo, fields

Group = Literal["cluster", "data path", "checkpoint", "debugging"]


class Flag(NamedTuple):
    """The documentation of a setting."""

    group: Group
    """Heading in `--help`."""
    help: str
    """One line in plain English."""
    default: str = ""
    """The effective default in words, if the field's default value does not show it."""
    hidden: bool = False
    """Whether `--help` omits the setting."""


cluster = partial(Flag, "cluster")
data_path = partial(Flag, "data path")
checkpoint = partial(Flag, "checkpoint")
debugging = partial(Flag, "debugging")


def declared(config: type[Struct], names: Collection[str] | None = None) -> Sequence[tuple[FieldInfo, Flag]]:
    """Returns the settings of a config, sorted by group; with `names`, only these."""
    found = {field.name: field for field in fields(config)}
    chosen = [found[name] for name in (found if names is None else names)]
    pairs = [(field, _flag(field)) for field in chosen]
    return sorted(pairs, key=lambda pair: get_args(Group).index(pair[1].group))


def default(field: FieldInfo, flag: Flag) -> str:
    """Returns the default in words; empty if the default is None, False or an empty tuple."""
    value = field.default
    if flag.default or value is None or value is False or value == ():
        return flag.default
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flag(field: FieldInfo) -> Flag:
    (flag,) = (part for part in get_args(field.type) if isinstance(part, Flag))
    return flag
