"""The process that a person starts with `--standby 1`: it starts the coordinator and waits for the result.

Law: no process is the only one of its kind. A standby replaces a coordinator that is killed; it is the
coordinator's child and has the same pipes to this process. This process passes signals on. If it is
killed, the coordinator handles signals.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hubring.ps.config.environment import environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import HubringError, ServerUnreachable
from hubring.ps.process.child import Child, ending, passing_on
from hubring.ps.process.launch import STOP_SIGNALS, module_command, stop_signals_held_back

SETTINGS_VARIABLE = "HUBRING_COORDINATOR"
"""Holds the settings."""

COORDINATOR_MODULE = "hubring.ps.server_process"


class CoordinatorSettings(msgspec.Struct, frozen=True):
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


def start_coordinator(name: str, settings: CoordinatorSettings) -> Child:
    """Starts a coordinator's process. It has the two pipes and handles no signals."""
    text = msgspec.json.encode(settings, enc_hook=str).decode()
    with stop_signals_held_back():
        return Child(
            name,
            module_command(COORDINATOR_MODULE),
            {**environment(), SETTINGS_VARIABLE: text},
            pass_fds=(settings.orders, settings.report),
        )


def own_settings() -> CoordinatorSettings:
    """Returns the settings of this process."""
    return msgspec.json.decode(environment()[SETTINGS_VARIABLE], type=CoordinatorSettings, dec_hook=_path)


def _path(kind: type[Any], value: Any) -> Path:
    assert kind is Path
    return Path(value)


class ServerReport(msgspec.Struct):
    """How a server ended.

    Attributes:
        exit_code: The exit code.
        result: The object for the last line of stdout.
        error: The error message, which has not been printed; empty if there is none.
    """

    exit_code: int
    result: dict[str, Any]
    error: str = ""

    @classmethod
    def of(cls, error: HubringError) -> ServerReport:
        """Returns the report on a server that an error ended."""
        return cls(error.exit_code, {"error": str(error), "exit_code": error.exit_code}, str(error))


class Guarded:
    """One run of a server whose coordinator has a standby.

    Args:
        config: The server's settings.
        conclude: Called with how the server ended.
    """

    def __init__(self, config: ServerConfig, conclude: Callable[[ServerReport], object]) -> None:
        self._config, self._conclude = config, conclude
        self._orders, order = os.pipe()
        self._order: int | None = order
        self.ended = ""

    def signal(self, number: int) -> None:
        """Passes a signal on, also one that comes before the start or after the end."""
        if self._order is not None:
            with contextlib.suppress(BrokenPipeError):  # the server has ended
                os.write(self._order, f"{number}\n".encode())

    def exit_code(self) -> int:
        """Starts the coordinator, and waits for the end of the server."""
        reports, report = os.pipe()
        with open(reports, "rb") as lines:
            coordinator = start_coordinator(
                "the coordinator", CoordinatorSettings(self._config, self._orders, report)
            )
            os.close(self._orders)
            os.close(report)
            # Ends after the last coordinator, since all have the other end.
            found = [msgspec.json.decode(line, type=ServerReport) for line in lines]
            coordinator.wait()
        ended = found[0] if found else _lost(coordinator)
        self.ended = ending(ended.exit_code)
        self._conclude(ended)
        return ended.exit_code

    def kill(self) -> None:
        """Closes the pipe of a server that has ended."""
        order, self._order = self._order, None
        if order is not None:
            os.close(order)


def guard(config: ServerConfig) -> ServerReport:
    """Runs a server whose coordinator has a standby; returns how it ended."""
    found: list[ServerReport] = []
    run = Guarded(config, found.append)
    with passing_on(STOP_SIGNALS, run.signal):
        run.exit_code()
    run.kill()
    return found[0]


def _lost(coordinator: Child) -> ServerReport:
    """Returns the report on a server that could send none."""
    error = ServerUnreachable(
        f"{coordinator} {coordinator.ended}, and so did its standby, so the job's state is lost. Restart the"
        " server with the same --checkpoint-dir, then restart the workers"
    )
    return ServerReport.of(error)
