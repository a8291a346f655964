"""Settles every setting from the places that may give it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hubring.ps.config import settings
from hubring.ps.config.environment import environment as own_environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.settings import origins, settle
from hubring.ps.config.submit import SubmitConfig
from hubring.ps.config.worker import WorkerConfig

_TABLES: Mapping[str, type[ServerConfig | WorkerConfig | SubmitConfig]] = {
    "server": ServerConfig,
    "worker": WorkerConfig,
    "submit": SubmitConfig,
}


def load_server(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Settles the server's settings.

    Args:
        flags: Field name to what the command line gave; None where it gave nothing.
        config_file: TOML file; None: the one that PS_CONFIG names, if any.
        environment: Instead of the process's own.

    Raises:
        ConfigError: Names the place, the value, what was allowed and the mend.
    """
    return ServerConfig(**settle("server", _TABLES, flags, config_file, _given(environment)))


def load_worker(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> WorkerConfig:
    """Settles a worker's settings; arguments and errors as of `load_server`."""
    return WorkerConfig(**settle("worker", _TABLES, flags, config_file, _given(environment)))


def load_submit(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> SubmitConfig:
    """Settles what `submit` is told for itself; arguments and errors as of `load_server`."""
    return SubmitConfig(**settle("submit", _TABLES, flags, config_file, _given(environment)))


def server_origins(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where each of the server's settings comes from that is no default; arguments and errors as above."""
    return origins("server", _TABLES, flags, config_file, _given(environment))


def worker_origins(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where each of a worker's settings comes from that is no default; arguments and errors as above."""
    return origins("worker", _TABLES, flags, config_file, _given(environment))


def faults(variables: Mapping[str, str]) -> dict[str, str]:
    """What is wrong with each variable of ours by itself, by its name: unknown, empty, or of a bad value."""
    return settings.faults(_TABLES, variables)


def _given(variables: Mapping[str, str] | None) -> Mapping[str, str]:
    return own_environment() if variables is None else variables
