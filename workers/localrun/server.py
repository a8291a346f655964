"""The server of one job. It starts before the workers, and ends after them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, HubringError, ServerUnreachable, UsageError
from hubring.ps.process.child import Child
from hubring.ps.process.launch import module_command

LOOK_SECONDS = 0.05
_KINDS: Mapping[int, type[HubringError]] = {kind.exit_code: kind for kind in (ConfigError, UsageError)}
GRACE_SECONDS = 20.0
"""How long the server has to end by itself after the job."""


class LocalServer:
    """Runs `ps-server start --once` on this machine; leaving the `with` block ends the server.

    Args:
        workers: Number of workers in the job.
        flags: More flags for `ps-server start`.
        environment: All environment variables of the server.
        verbose: Whether the log goes to standard error. Otherwise it is shown only if the start fails.
        timeout: Seconds within which the server must start.

    Attributes:
        address: Address of the server.
        process: The server's process.
        progress: The file for the progress line of rank 0. It ends with the server.
        job: The name of its job when it ended; empty if no worker joined, or it printed no result.
        steps: The steps that its job had completed then.
        overdue: Whether it did not end in time, and was killed.

    Raises:
        ConfigError: The server refused its settings. The message holds its log, or with `verbose` its last
            line of output.
        UsageError: A flag is unknown.
        ServerUnreachable: The server ended during the start for another reason.
        DeadlineExceeded: The server did not listen within `timeout`.
    """

    def __init__(
        self,
        workers: int,
        flags: Sequence[str],
        environment: Mapping[str, str],
        *,
        verbose: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self._folder = TemporaryDirectory(prefix="ps-run-")
        self._log = Path(self._folder.name) / "server.err"
        self._out = Path(self._folder.name) / "server.out"
        self.progress = Path(self._folder.name) / "progress"
        self.job, self.steps, self.overdue = "", 0, False
        where = Path(self._folder.name) / "address"
        command = module_command(
            "hubring.ps.cli", "start", "--port", "0", "--once", "--workers", str(workers)
        )
        command += ["--address-file", str(where), *flags]
        with self._log.open("wb") as log, self._out.open("wb") as out:
            errors = None if verbose else log
            self.process = Child("the server", command, environment, stdout=out, stderr=errors)
        try:
            self.address = self._await(where, timeout)
        except BaseException:
            self.end(0.0)
            raise

    @property
    def banner(self) -> str:
        """What the server logged so far; empty with `verbose`."""
        return self._log.read_text(errors="replace")

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(GRACE_SECONDS if kind is None else 0.0)

    def has_finished(self, rank: int) -> bool:
        """Returns whether a worker has left the job as finished, and only waited to hear how the job ends."""
        command = module_command("hubring.ps.cli", "status", self.address)
        status = subprocess.run(command, capture_output=True, check=False)
        return rank in _last_line(status.stdout).get("ended", {}).get("finished", ())

    def end(self, patience: float | None) -> None:
        """Waits `patience` seconds (None: without limit) until the server ends, then stops it."""
        if not self.process.wait(patience):
            self.process.ask_to_stop()
            self.overdue = not self.process.wait(GRACE_SECONDS)
            if self.overdue:
                self.process.kill()
        if self._out.exists():
            result = _last_line(self._out.read_bytes())
            self.job, self.steps = str(result.get("job", "")), int(result.get("steps", 0))
        self._folder.cleanup()

    def _await(self, where: Path, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while not where.exists():
            if self.process.wait(LOOK_SECONDS):
                text = self.banner or self._out.read_text() or f"it {self.process.ended}, with an empty log"
                kind = _KINDS.get(self.process.exit_code(), ServerUnreachable)
                raise kind(f"the server did not start:\n{text}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the server did not start within {timeout:g} s (--start-timeout)")
        return where.read_text().strip()


def _last_line(output: bytes) -> dict[str, Any]:
    """Returns the object that a program printed last; empty if it printed none."""
    with contextlib.suppress(ValueError, IndexError):
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result
    return {}
