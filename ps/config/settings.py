"""Reads settings from flags, the environment and a TOML file, and checks their names and values.

This module knows no setting by name; other files of `hubring.ps.config` declare them.
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

from hubring.ps.config import values
from hubring.ps.config.values import HIDDEN_VALUE
from hubring.ps.core.errors import ConfigError

Tables = Mapping[str, type[Struct]]
"""Maps the name of a TOML table to its config."""


def settle(
    table: str,
    tables: Tables,
    flags: Mapping[str, object],
    config_file: Path | None,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the value of every field of `tables[table]` that a source sets, by field name.

    Raises:
        ConfigError: A name or a value is invalid. The message has the source, the value and what is valid.
    """
    types = {field.name: field.type for field in fields(tables[table])}
    _check_others(types, tables, variables)
    places = _weakest_first(table, tables, flags, config_file, variables)
    return {name: place.value(name, types[name]) for place in places for name in place.given}


def _check_others(own: Mapping[str, Any], tables: Tables, variables: Mapping[str, str]) -> None:
    """Checks the variables that only other programs use: a job's programs share one environment."""
    others = {field.name: field.type for kind in tables.values() for field in fields(kind)}
    place = _Source(_own_variables(variables, tables), _VARIABLE, typed=False)
    for name in place.given:
        if name in others and name not in own:
            place.value(name, others[name])


def origins(
    table: str,
    tables: Tables,
    flags: Mapping[str, object],
    config_file: Path | None,
    variables: Mapping[str, str],
) -> dict[str, str]:
    """Returns each setting as its source spells it, by field name.

    Arguments and errors are those of `settle`.
    """
    places = _weakest_first(table, tables, flags, config_file, variables)
    return {name: place.spell(name) for place in places for name in place.given}


def _weakest_first(
    table: str,
    tables: Tables,
    flags: Mapping[str, object],
    config_file: Path | None,
    variables: Mapping[str, str],
) -> tuple[_Source, ...]:
    own = _own_variables(variables, tables)
    if why := values.file_name_objection(own.get("config", "")):
        raise ConfigError(f"PS_CONFIG in the environment: {why}")
    path = config_file or (Path(own["config"]) if "config" in own else None)
    names = {field.name for field in fields(tables[table])}
    return (
        _Source(
            _read_table(path, table, tables) if path else {}, f"{{name}} = {{value!r}} in {path} [{table}]"
        ),
        _Source({name: text for name, text in own.items() if name in names}, _VARIABLE, typed=False),
        _Source({name: value for name, value in flags.items() if value is not None}, "{flag} {value}"),
    )


def faults(tables: Tables, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the error message for each variable that is invalid by itself, by variable name."""
    found = {}
    for name, value in variables.items():
        try:
            for table in tables:
                settle(table, tables, {}, None, {name: value})
        except ConfigError as error:
            found[name] = str(error)
    return found


def flag(name: str) -> str:
    """Returns the flag that sets this field."""
    return "--" + name.replace("_", "-")


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings, by field name, as flags of a command line."""
    words = []
    for name, value in settings.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return words


@dataclass(frozen=True, slots=True)
class _Source:
    """One source of settings, and how it spells them in an error message."""

    given: Mapping[str, object]
    spelling: str
    typed: bool = True
    """False if every value is text."""

    def value(self, name: str, kind: Any) -> object:
        given = self.given[name]
        found: object = given
        if not isinstance(given, Path):
            try:
                found = msgspec.convert(given, kind, strict=self.typed, dec_hook=_to_path)
            except msgspec.ValidationError as cause:
                raise ConfigError(f"{self.spell(name)}: expected {allowed(kind)}") from cause
        if isinstance(found, Path) and (why := values.file_name_objection(str(found))):
            raise ConfigError(f"{self.spell(name, HIDDEN_VALUE)}: {why}")
        return found

    def spell(self, name: str, value: object = None) -> str:
        """Returns a setting as this source spells it, with another value if one is given."""
        value = values.shown_value(self.given[name]) if value is None else value
        return self.spelling.format(name=name, NAME=name.upper(), flag=flag(name), value=value)


def _to_path(kind: type, value: object) -> object:
    assert kind is Path
    if not isinstance(value, str):
        raise TypeError("a path must be text")
    return Path(value)


def allowed(kind: Any) -> str:
    """Describes the valid values of a type in words."""
    origin = get_origin(kind)
    if origin is tuple:
        return f"{allowed(get_args(kind)[0])}; or a list of them"
    if origin is Annotated:
        descriptions = [part.description for part in kind.__metadata__ if isinstance(part, msgspec.Meta)]
        return descriptions[0] or "" if descriptions else allowed(kind.__origin__)
    if origin is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if origin in (Union, UnionType):
        return allowed(get_args(kind)[0])
    return {bool: "true or false", str: "text", Path: "a path"}[kind]


_VARIABLE = "PS_{NAME}={value!r} in the environment"
_OF_PROCPS = {"PS_COLORS", "PS_FORMAT", "PS_PERSONALITY", "PS_SYSTEM_MAP"}
# Kubernetes sets variables for every service of the namespace: a service named `ps` or
# `ps-server` sets PS_PORT=tcp://..., PS_SERVER_SERVICE_HOST=... and so on.
_OF_KUBERNETES = re.compile(
    r"PS_(\w+_)?(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)=.*|PS_(\w+_)?PORT=\w+://.*"
)


def _own_variables(variables: Mapping[str, str], tables: Tables) -> dict[str, str]:
    """Returns Hubring's PS_* variables, by field name."""
    known = {"PS_CONFIG"} | {f"PS_{field.name.upper()}" for kind in tables.values() for field in fields(kind)}
    own = {}
    for name, value in variables.items():
        if not name.startswith("PS_") or name in _OF_PROCPS or _OF_KUBERNETES.fullmatch(f"{name}={value}"):
            continue
        refuse_unknown(f"{name} in the environment", name, known)
        if not value:
            raise ConfigError(f"{name} in the environment is empty; set a value, or unset it")
        own[name.removeprefix("PS_").lower()] = value
    return own


def _read_table(path: Path, table: str, tables: Tables) -> Mapping[str, object]:
    """Returns the file's table of that name; checks the names in all tables."""
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
    """Parses a TOML file.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as cause:
        raise ConfigError(f"settings file {path} cannot be read: {cause.strerror}; check the path") from cause
    except ValueError as cause:
        raise ConfigError(f"settings file {path} is not TOML: {cause}") from cause


def refuse_unknown(where: str, name: str, known: Iterable[str]) -> None:
    """Checks that a name is known.

    Raises:
        ConfigError: The name is unknown. The message suggests a similar name, or lists all names.
    """
    if name in (known := sorted(known)):
        return
    guess = difflib.get_close_matches(name, known, n=1)
    fix = f"did you mean {guess[0]}?" if guess else f"valid names: {', '.join(known)}"
    raise ConfigError(f"{where}: no such setting; {fix}")
