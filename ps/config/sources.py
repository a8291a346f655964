"""Loads the config of each program from flags, the environment and a TOML file, and lists all settings.

`python -m hubring.ps.config.sources > deploy/SETTINGS.md` writes the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from hubring.ps.config import settings
from hubring.ps.config.declaration import declared_settings, default_in_words
from hubring.ps.config.environment import environment as own_environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.settings import allowed, flag
from hubring.ps.config.submit import SubmitConfig
from hubring.ps.config.worker import WorkerConfig

TABLES: Mapping[str, type[Struct]] = {"server": ServerConfig, "worker": WorkerConfig, "submit": SubmitConfig}

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
        ConfigError: A name or a value is invalid, or settings contradict each other.
    """
    return config(**settings.settle(_table(config), TABLES, flags, config_file, _given(environment)))


def origins(
    config: type[Struct],
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the source of each setting that is not a default. Arguments and errors are those of `load`."""
    return settings.origins(_table(config), TABLES, flags, config_file, _given(environment))


load_server = partial(load, ServerConfig)
load_worker = partial(load, WorkerConfig)
load_submit = partial(load, SubmitConfig)
server_origins = partial(origins, ServerConfig)
worker_origins = partial(origins, WorkerConfig)


def faults(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the error message for each PS_* variable that is unknown, empty or invalid, by name."""
    return settings.faults(TABLES, variables)


def _table(config: type[Struct]) -> str:
    return next(name for name, kind in TABLES.items() if kind is config)


def _given(variables: Mapping[str, str] | None) -> Mapping[str, str]:
    return own_environment() if variables is None else variables


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
