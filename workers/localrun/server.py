"""The server of one job: started before its workers, and gone after them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryDirectory
from types import TracebackType

from hubring.ps.core.errors import DeadlineExceeded, ServerUnreachable
from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command

LOOK_SECONDS = 0.1
GRACE_SECONDS = 20.0
"""How long it gets to end by itself once its job is over."""


class Server:
    """A `ps-server start --once` on this machine; leaving the `with` block ends it.

    Args:
        workers: How many the job has.
        flags: More for `ps-server start`.
        environment: All of its variables.
        verbose: Its log goes to standard error; else it is shown only if it fails to start.
        timeout: Seconds that its start may take.

    Attributes:
        address: Where it listens.

    Raises:
        ServerUnreachable: It ended at once; the text holds its log, or with `verbose` its last line.
        DeadlineExceeded: It does not listen in time.
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
        where = Path(self._folder.name) / "address"
        command = module_command(
            "hubring.ps.cli", "start", "--port", "0", "--once", "--workers", str(workers)
        )
        command += ["--address-file", str(where), *flags]
        with self._log.open("wb") as log:
            # Its last line is of no use beside the workers', but tells why it did not start.
            outputs = (log, None) if verbose else (DEVNULL, log)
            self._child = Child("the server", command, environment, stdout=outputs[0], stderr=outputs[1])
        try:
            self.address = self._await(where, timeout)
        except BaseException:
            self.end(0.0)
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(GRACE_SECONDS if kind is None else 0.0)

    def end(self, patience: float | None) -> None:
        """Waits `patience` seconds (None: as long as it takes) for its end, and then makes it end."""
        if not self._child.wait(patience):
            self._child.stop(GRACE_SECONDS)
        self._folder.cleanup()

    def _await(self, where: Path, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while not where.exists():
            if self._child.wait(LOOK_SECONDS):
                said = self._log.read_text(errors="replace") or f"it {self._child.ended} and said nothing"
                raise ServerUnreachable(f"the server did not start:\n{said}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the server did not listen within {timeout:g} s (--start-timeout)")
        return where.read_text().strip()
