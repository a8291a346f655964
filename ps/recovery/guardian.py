"""The process that a person starts with `--standby 1`: it starts the coordinator and waits for the result.

Law: no process is the only one of its kind. A standby replaces a coordinator that is killed; it is the
coordinator's child and has the same pipes to this process. This process passes signals on. If it is killed,
the coordinator handles signals.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.process.children import passing_on
from hubring.ps.process.stop_signals import STOP_SIGNALS
from hubring.ps.recovery.settings import Settings, start


class Report(msgspec.Struct):
    """How a server ended.

    Attributes:
        exit_code: The exit code.
        result: The object for the last line of stdout.
        error: The error message, which has not been printed; empty if there is none.
    """

    exit_code: int
    result: dict[str, Any]
    error: str = ""


def guard(config: ServerConfig) -> Report:
    """Runs a server whose coordinator has a standby; returns how it ended.

    Raises:
        ServerUnreachable: The coordinator and its standby were killed.
    """
    orders, order = os.pipe()
    reports, report = os.pipe()

    def pass_on(number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the server has ended
            os.write(order, f"{number}\n".encode())

    with passing_on(STOP_SIGNALS, pass_on), open(reports, "rb") as lines:
        coordinator = start("the coordinator", Settings(config, orders, report))
        os.close(orders)
        os.close(report)
        # Ends after the last coordinator, since all have the other end.
        found = [msgspec.json.decode(line, type=Report) for line in lines]
        coordinator.wait()
    os.close(order)
    if found:
        return found[0]
    raise ServerUnreachable(
        f"{coordinator} {coordinator.ended}, and so did its standby, so the job's state is lost. Restart the"
        " server with the same --checkpoint-dir, then restart the workers"
    )
