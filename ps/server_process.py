"""With `--standby 1`, a coordinator's process or its standby: `python -m hubring.ps.server_process`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hubring.ps.config import terminal
from hubring.ps.core.errors import HubringError
from hubring.ps.observe import logs
from hubring.ps.page import site
from hubring.ps.process import stop_signals
from hubring.ps.process.end_with_parent import await_end
from hubring.ps.recovery.guardian import Report
from hubring.ps.recovery.settings import Settings, own_settings
from hubring.ps.recovery.state_file import StateFile
from hubring.ps.recovery.succession import Succession, report
from hubring.ps.server import Server


def main() -> int:
    """Serves at once, or as a standby once the coordinator is killed; returns the exit code."""
    settings = own_settings()
    logs.configure(settings.config.log_format).role = "hub"
    if settings.predecessor:
        site.load()
        await_end(settings.predecessor)  # one that ends by itself kills its standby
    try:
        inherited = StateFile(Path(settings.state)).read() if settings.predecessor else None
    except HubringError as error:
        return _conclude(settings, Report.of(error))
    succession = Succession(settings, inherited)
    try:
        return _conclude(settings, _run(settings, succession))
    finally:
        succession.end()  # until then the standby takes over if this process is killed


def _run(settings: Settings, succession: Succession) -> Report:
    try:
        code, result = asyncio.run(Server(settings.config, succession).run())
    except HubringError as error:
        return Report.of(error)
    return Report(code, {**result, "exit_code": code})


def _conclude(settings: Settings, ended: Report) -> int:
    """Reports how the server ended; returns the exit code."""
    if not report(settings, ended):
        terminal.last_line(ended.result)
    return ended.exit_code


if __name__ == "__main__":
    stop_signals.ignore()
    raise SystemExit(main())
