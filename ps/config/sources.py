"""Settles every setting from the places that may give it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from hubring.ps.config import settings
from hubring.ps.config.environment import environment as own_environment
from hubring.ps.config.server import ServerConfig
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
    """Settles the settings of a program.

    Args:
        config: What to make.
        flags: Field name to what the command line gave; None where it gave nothing.
        config_file: TOML file; None: the one that PS_CONFIG names, if any.
        environment: Instead of the process's own.

    Raises:
        ConfigError: Names the place, the value, what was allowed and the mend.
    """
    return config(**settings.settle(_table(config), TABLES, flags, config_file, _given(environment)))


def origins(
    config: type[Struct],
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where each setting comes from that is no default; arguments and errors as of `load`."""
    return settings.origins(_table(config), TABLES, flags, config_file, _given(environment))


load_server = partial(load, ServerConfig)
load_worker = partial(load, WorkerConfig)
load_submit = partial(load, SubmitConfig)
server_origins = partial(origins, ServerConfig)
worker_origins = partial(origins, WorkerConfig)


def faults(variables: Mapping[str, str]) -> dict[str, str]:
    """What is wrong with each variable of ours by itself, by its name: unknown, empty, or of a bad value."""
    return settings.faults(TABLES, variables)


def _table(config: type[Struct]) -> str:
    return next(name for name, kind in TABLES.items() if kind is config)


def _given(variables: Mapping[str, str] | None) -> Mapping[str, str]:
    return own_environment() if variables is None else variables
