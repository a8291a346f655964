"""What a coordinator's process gets from the process that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hubring.ps.config.environment import environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command
from hubring.ps.process.stop_signals import held_back

VARIABLE = "HUBRING_COORDINATOR"
"""Holds the settings."""

MODULE = "hubring.ps.server_process"


class Settings(msgspec.Struct, frozen=True):
    """The settings of a coordinator's process.

    Attributes:
        config: The server's settings.
        orders: Descriptor of a pipe on which the guardian sends the numbers of signals, one in a line.
        report: Descriptor of a pipe for the server's result. It has no writer left once the server has ended.
        predecessor: Process id of the coordinator whose standby this is; 0 for the first coordinator.
        state: That coordinator's state file.
    """

    config: ServerConfig
    orders: int
    report: int
    predecessor: int = 0
    state: str = ""


def start(name: str, settings: Settings) -> Child:
    """Starts a coordinator's process. It has the two pipes and handles no signals."""
    text = msgspec.json.encode(settings, enc_hook=str).decode()
    with held_back():
        return Child(
            name,
            module_command(MODULE),
            {**environment(), VARIABLE: text},
            pass_fds=(settings.orders, settings.report),
        )


def own_settings() -> Settings:
    """Returns the settings of this process."""
    return msgspec.json.decode(environment()[VARIABLE], type=Settings, dec_hook=_path)


def _path(kind: type[Any], value: Any) -> Path:
    assert kind is Path
    return Path(value)
