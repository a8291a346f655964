"""How settings are found: which places give them, which names exist, what they may hold.

It knows no setting by name; `hubring.ps.config`'s files list them.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.core.errors import ConfigError

Tables = Mapping[str, type[Struct]]
"""Name of a TOML table to the config that it fills."""


def settle(
    table: str,
    tables: Tables,
    flags: Mapping[str, object],
    config_file: Path | None,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Field name to value for every field of `tables[table]` that some place gives.

    Raises:
        ConfigError: Names the place, the value, what was allowed and the mend.
    """
    types = {field.name: field.type for field in fields(tables[table])}
    places = _weakest_first(table, tables, flags, config_file, variables)
    return {name: place.value(name, types[name]) for place in places for name in place.given}


def origins(
    table: str,
    tables: Tables,
    flags: Mapping[str, object],
    config_file: Path | None,
    variables: Mapping[str, str],
) -> dict[str, str]:
    """Field name to where its value comes from, as spelt there; arguments and errors as of `settle`."""
    places = _weakest_first(table, tables, flags, config_file, variables)
    return {name: place.spell(name) for place in places for name in place.given}


def _weakest_first(
    table: str,
    tables: Tables,
    flags: Mapping[str, object],
    config_file: Path | None,
    variables: Mapping[str, str],
) -> tuple[_Place, ...]:
    told = _own_variables(variables, tables)
    path = config_file or (Path(told["config"]) if "config" in told else None)
    names = {field.name for field in fields(tables[table])}
    return (
        _Place(
            _read_table(path, table, tables) if path else {}, f"{{name}} = {{value!r}} in {path} [{table}]"
        ),
        _Place({name: text for name, text in told.items() if name in names}, _VARIABLE, typed=False),
        _Place({name: value for name, value in flags.items() if value is not None}, "{flag} {value}"),
    )


def faults(tables: Tables, variables: Mapping[str, str]) -> dict[str, str]:
    """What is wrong with a variable by itself, by its name; of those that are right there is nothing."""
    found = {}
    for name, value in variables.items():
        try:
            for table in tables:
                settle(table, tables, {}, None, {name: value})
        except ConfigError as error:
            found[name] = str(error)
    return found


def flag(name: str) -> str:
    """The flag that sets this field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class _Place:
    """One place that gives settings, and how it spells them in an error message."""

    given: Mapping[str, object]
    spelling: str
    typed: bool = True
    """False where every value is text."""

    def value(self, name: str, kind: Any) -> object:
        given = self.given[name]
        if isinstance(given, Path):
            return given
        try:
            return msgspec.convert(given, kind, strict=self.typed, dec_hook=_to_path)
        except msgspec.ValidationError as cause:
            raise ConfigError(f"{self.spell(name)}: expected {allowed(kind)}") from cause

    def spell(self, name: str) -> str:
        """A setting as it stands here."""
        value = self.given[name]
        return self.spelling.format(name=name, NAME=name.upper(), flag=flag(name), value=value)


def _to_path(kind: type, value: object) -> object:
    assert kind is Path
    if not isinstance(value, str):
        raise TypeError("a path is text")
    return Path(value)


def allowed(kind: Any) -> str:
    """In words, what a field of this type may hold."""
    origin = get_origin(kind)
    if origin is tuple:
        return f"{allowed(get_args(kind)[0])}; or a list of such"
    if origin is Annotated:
        said = [part.description for part in kind.__metadata__ if isinstance(part, msgspec.Meta)]
        return said[0] or "" if said else allowed(kind.__origin__)
    if origin is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if origin in (Union, UnionType):
        return allowed(get_args(kind)[0])
    return {bool: "true or false", str: "text", Path: "a path"}[kind]


_VARIABLE = "PS_{NAME}={value!r} in the environment"
_OF_PROCPS = {"PS_COLORS", "PS_FORMAT", "PS_PERSONALITY", "PS_SYSTEM_MAP"}
# Kubernetes tells every container of the services beside it: one named `ps` or
# `ps-server` leaves PS_PORT=tcp://..., PS_SERVER_SERVICE_HOST=... and the like.
_OF_KUBERNETES = re.compile(
    r"PS_(\w+_)?(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)=.*|PS_(\w+_)?PORT=\w+://.*"
)


def _own_variables(variables: Mapping[str, str], tables: Tables) -> dict[str, str]:
    """The PS_* variables that are ours, by field name."""
    known = {"PS_CONFIG"} | {f"PS_{field.name.upper()}" for kind in tables.values() for field in fields(kind)}
    told = {}
    for name, value in variables.items():
        if not name.startswith("PS_") or name in _OF_PROCPS or _OF_KUBERNETES.fullmatch(f"{name}={value}"):
            continue
        refuse_unknown(f"{name} in the environment", name, known)
        if not value:
            raise ConfigError(f"{name} in the environment is empty: give it a value, or unset it")
        told[name.removeprefix("PS_").lower()] = value
    return told


def _read_table(path: Path, table: str, tables: Tables) -> Mapping[str, object]:
    """The file's table of that name; the names in the other tables are checked too."""
    content = read_toml(path)
    for name, settings in content.items():
        refuse_unknown(f"[{name}] in {path}", name, tables)
        if not isinstance(settings, dict):
            raise ConfigError(f"{name} = {settings!r} in {path}: expected a table, [{name}]")
        for key in settings:
            refuse_unknown(f"{key} in {path} [{name}]", key, {field.name for field in fields(tables[name])})
    chosen: Mapping[str, object] = content.get(table, {})
    return chosen


def read_toml(path: Path) -> dict[str, Any]:
    """What the file holds.

    Raises:
        ConfigError: It cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as cause:
        raise ConfigError(f"settings file {path} cannot be read: {cause.strerror}") from cause
    except ValueError as cause:
        raise ConfigError(f"settings file {path} is not TOML: {cause}") from cause


def refuse_unknown(where: str, name: str, known: Iterable[str]) -> None:
    """Makes sure that a name is known.

    Raises:
        ConfigError: It is not; proposes the one that was meant, or lists all.
    """
    if name in (known := sorted(known)):
        return
    guess = difflib.get_close_matches(name, known, n=1)
    mend = f"did you mean {guess[0]}?" if guess else f"there are {', '.join(known)}"
    raise ConfigError(f"{where}: no such setting; {mend}")
