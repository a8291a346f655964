"""Loads the config of each program from flags, the environment and a TOML file, and lists all settings.

`python -m hubring.ps.config.sources > deploy/SETTINGS.md` writes the list.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config import values
from hubring.ps.config.declaration import declared_settings, default_in_words, flag
from hubring.ps.config.environment import environment as own_environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.submit import SubmitConfig
from hubring.ps.config.values import HIDDEN_VALUE
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError

TABLES: dict[str, type[Struct]] = {"server": ServerConfig, "worker": WorkerConfig, "submit": SubmitConfig}
"""Maps the name of a TOML table to its config."""

_Config = TypeVar("_Config", bound=Struct)


def load(
    config: type[_Config],
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> _Config:
    """Loads the config of a program.

    Args:
        config: The config's class.
        flags: Values from the command line, by field name; None for flags that are not set.
        config_file: TOML file. The default is the file in PS_CONFIG, if any.
        environment: Variables to use instead of the process's environment.

    Raises:
        ConfigError: A name or a value is invalid, or settings contradict each other. The message has the
            source, the value and what is valid.
    """
    return config(**_values(config, _weakest_first(config, flags, config_file, environment)))


def origins(
    config: type[Struct],
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns each setting that is not a default as its source spells it, by field name.

    Arguments and errors are those of `load`.
    """
    places = _weakest_first(config, flags, config_file, environment)
    return {name: place.spell(name) for place in places for name in place.given}


load_server = partial(load, ServerConfig)
load_worker = partial(load, WorkerConfig)
server_origins = partial(origins, ServerConfig)
worker_origins = partial(origins, WorkerConfig)


def faults(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the error message for each PS_* variable that is invalid by itself, by variable name."""
    found = {}
    for name, value in variables.items():
        try:
            _values(ServerConfig, _weakest_first(ServerConfig, {}, None, {name: value}))
        except ConfigError as error:
            found[name] = str(error)
    return found


def _values(config: type[Struct], places: Iterable[_Source]) -> dict[str, Any]:
    types = _types(config)
    return {name: place.value(name, types[name]) for place in places for name in place.given}


def _weakest_first(
    config: type[Struct],
    flags: Mapping[str, object],
    config_file: Path | None,
    environment: Mapping[str, str] | None,
) -> tuple[_Source, ...]:
    own, types = _own_variables(own_environment() if environment is None else environment), _types(config)
    # A job's programs share one environment, so each also checks the variables of the others.
    others = {name: kind for table in TABLES.values() for name, kind in _types(table).items()}
    for name in own:
        if name in others and name not in types:
            _Source(own, _VARIABLE, typed=False).value(name, others[name])
    if why := values.file_name_objection(own.get("config", "")):
        raise ConfigError(f"PS_CONFIG in the environment: {why}")
    path = config_file or (Path(own["config"]) if "config" in own else None)
    [table] = [name for name, kind in TABLES.items() if kind is config]
    return (
        _Source(_read_table(path, table) if path else {}, f"{{name}} = {{value!r}} in {path} [{table}]"),
        _Source({name: text for name, text in own.items() if name in types}, _VARIABLE, typed=False),
        _Source({name: value for name, value in flags.items() if value is not None}, "{flag} {value}"),
    )


def _types(config: type[Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in fields(config)}


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


def _own_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns Hubring's PS_* variables, by field name."""
    known = {"PS_CONFIG"} | {f"PS_{name.upper()}" for kind in TABLES.values() for name in _types(kind)}
    own = {}
    for name, value in variables.items():
        if not name.startswith("PS_") or name in _OF_PROCPS or _OF_KUBERNETES.fullmatch(f"{name}={value}"):
            continue
        refuse_unknown(f"{name} in the environment", name, known)
        if not value:
            raise ConfigError(f"{name} in the environment is empty; set a value, or unset it")
        own[name.removeprefix("PS_").lower()] = value
    return own


def _read_table(path: Path, table: str) -> Mapping[str, object]:
    """Returns the file's table of that name; checks the names in all tables."""
    content = read_toml(path)
    for name, settings in content.items():
        refuse_unknown(f"[{name}] in {path}", name, TABLES)
        if not isinstance(settings, dict):
            raise ConfigError(f"{name} = {settings!r} in {path}: expected a table, [{name}]")
        for key in settings:
            refuse_unknown(f"{key} in {path} [{name}]", key, _types(TABLES[name]))
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


def settings_page() -> str:
    """Returns the page in Markdown."""
    return _SETTINGS_PAGE + "".join(
        f"\n## {program}, table `[{name}]`\n\n{_SETTINGS_HEAD}{''.join(settings_rows(TABLES[name]))}"
        for name, program in _PROGRAMS.items()
    )


def settings_rows(config: type[Struct]) -> Iterator[str]:
    """Yields a table row for each setting of a config."""
    for field, text in declared_settings(config):
        name, unset = field.name, "false" if field.default is False else "none"
        default = default_in_words(field, text) or unset
        yield f"| `{flag(name)}` | {allowed(field.type)} | {default} | {text.help} |\n"


_PROGRAMS = {"server": "`ps-server start`", "worker": "`ps-worker`", "submit": "`ps-server submit`"}
_SETTINGS_HEAD = """\
| flag | value | default | meaning |
| --- | --- | --- | --- |
"""
_SETTINGS_PAGE = """\
# Settings

Every setting is a flag, an environment variable and a key in a TOML file: `--page-port`, `PS_PAGE_PORT` and
`page_port` are one. A flag overrides the variable, the variable overrides the file, and the file overrides
the default. Name the file with `--config` or `PS_CONFIG`.

`ps-server submit` also accepts flags of `ps-server start` and `ps-worker`: see `ps-server submit --help`.

This page is generated from `ps/config/`: `python -m hubring.ps.config.sources > deploy/SETTINGS.md`.
"""


if __name__ == "__main__":
    print(settings_page(), end="")
