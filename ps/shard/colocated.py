"""Companion: the shard that a worker brings along to a hub that starts none (`--colocate`).

It is a process of its own: as a thread it would wait for the interpreter lock of
a script that computes, and all other workers with it. It must outlive the
worker's own training, and never the worker.
"""

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import time
from collections.abc import Callable

from hubring.ps.config.address import is_loopback
from hubring.ps.config.kinds import LogFormat
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.waiting import TOLD_EVERY
from hubring.ps.shard.spawn import Settings, command, ending
from hubring.ps.transport.host import towards

log = logging.getLogger(__name__)

STOP_SECONDS = 15.0
"""How long the shard gets to stop by itself; a busy machine takes its time."""


class Companion:
    """One shard process beside this worker.

    Args:
        control: The coordinator's `HOST:PORT`, as this worker dials it.
        host: Address to listen on.
        worker: This worker's incarnation: the coordinator takes the shard as its.
        log_format: How the shard's log looks.
        trace: Folder for a trace of what it does; empty: none.
    """

    def __init__(self, control: str, host: str, worker: int, log_format: LogFormat, trace: str = "") -> None:
        self._process = subprocess.Popen(
            command(Settings(control, host, log_format, worker, trace=trace)),
            stdin=subprocess.PIPE,
            process_group=0,  # a Ctrl-C in the terminal is the worker's to handle
        )

    def __str__(self) -> str:
        return f"its shard (pid {self._process.pid})"

    @property
    def ended(self) -> str:
        """How it ended, as a clause; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else ending(code)

    def outlast(self, needs: Callable[[], str]) -> None:
        """Returns once nobody needs it any more, or it has ended.

        Args:
            needs: Waits a little; returns who needs it, empty if nobody does.
        """
        told = -math.inf
        while (whom := needs()) and not self.ended:
            if time.monotonic() - told > TOLD_EVERY:
                log.info("done here; %s still serves %s", self, whom)
                told = time.monotonic()

    def end(self) -> None:
        """Ends it: by a word, and if it does not heed that by force."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            # Closing the pipe would not do: a process that the script forked may hold its other copy.
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop: killed", self)
            self._process.kill()
            self._process.wait()


def place(dialled: str, told: str, insecure: bool) -> str:
    """The address on which this host's shard listens: all who reach the server must reach it.

    Args:
        dialled: The server's host, as this worker reached it.
        told: The server's host, as it stands in the server's banner.
        insecure: The server allows shards beyond loopback.

    Raises:
        ConfigError: It would be beyond loopback, and that is not allowed.
    """
    # Who dials a server by loopback shares its host, but other workers may not.
    here = towards(told if is_loopback(dialled) else dialled)
    if not is_loopback(here) and not insecure:
        raise ConfigError(
            f"this worker's shard would listen on {here}, which other machines reach, and the server at"
            f" {dialled} was not told that the network is trusted: start it with --host and --insecure"
        )
    return here
