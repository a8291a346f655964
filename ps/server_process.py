"""With `--standby 1`, a coordinator's process or its standby: `python -m hubring.ps.server_process`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hubring.ps.config import terminal
from hubring.ps.core.errors import HubringError
from hubring.ps.observe import logs
from hubring.ps.page import site
from hubring.ps.process import launch
from hubring.ps.process.launch import await_parent_end
from hubring.ps.recovery.guardian import CoordinatorSettings, ServerReport, own_settings
from hubring.ps.recovery.succession import StateFile, Succession, report_to_guardian
from hubring.ps.server import Server


def main() -> int:
    """Serves at once, or as a standby once the coordinator is killed; returns the exit code."""
    settings = own_settings()
    logs.configure(settings.config.log_format).role = "hub"
    if settings.predecessor:
        site.load()
        await_parent_end(settings.predecessor)  # one that ends by itself kills its standby
    try:
        inherited = StateFile(Path(settings.state)).read() if settings.predecessor else None
    except HubringError as error:
        return _conclude(settings, ServerReport.of(error))
    succession = Succession(settings, inherited)
    try:
        return _conclude(settings, _run(settings, succession))
    finally:
        succession.end()  # until then the standby takes over if this process is killed


def _run(settings: CoordinatorSettings, succession: Succession) -> ServerReport:
    try:
        code, result = asyncio.run(Server(settings.config, succession).run())
    except HubringError as error:
        return ServerReport.of(error)
    return ServerReport(code, {**result, "exit_code": code})


def _conclude(settings: CoordinatorSettings, ended: ServerReport) -> int:
    """Reports how the server ended; returns the exit code."""
    if not report_to_guardian(settings, ended):
        terminal.last_line(ended.result)
    return ended.exit_code


if __name__ == "__main__":
    launch.leave_signals_to_parent()
    raise SystemExit(main())
