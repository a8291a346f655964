"""How a server's state passes from a coordinator that is killed to its standby."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.process.child import Child
from hubring.ps.recovery.commit import Commits
from hubring.ps.recovery.guardian import Report
from hubring.ps.recovery.records import State
from hubring.ps.recovery.settings import Settings, start
from hubring.ps.recovery.state_file import StateFile
from hubring.ps.security.token_file import runtime_file

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
"""A standby that ends is replaced at most this often."""
ORPHAN_SECONDS = 20.0
"""How long workers may take to join once the guardian is gone: a launcher starts both at the same time."""


class Succession:
    """A coordinator's ties to its guardian, its predecessor and its standby.

    Args:
        settings: The settings of this process.
        inherited: The state of the coordinator that this process replaces; None for the first one.
    """

    def __init__(self, settings: Settings, inherited: State | None) -> None:
        self.inherited = inherited
        self._orphaned = math.inf
        """When the guardian was killed, in monotonic seconds."""
        self._settings = settings
        self._commits: Commits | None = None
        self._file: StateFile | None = None
        self._standby: Child | None = None
        self._started = -AGAIN_SECONDS

    def begin(self, port: int, fleet: Fleet, capture: Callable[[], State]) -> None:
        """Writes the state from now on.

        Args:
            port: The server's port, after which the state file is named.
            fleet: The shards. The state is written before each call that changes them.
            capture: Returns the server's state.

        Raises:
            ConfigError: The user's runtime directory cannot be used.
        """
        self._file = StateFile(runtime_file(port).with_suffix(".state"))
        self._commits = Commits(self._file, capture)
        self._commits.commit()
        fleet.before_call = self._commits.commit

    async def settle(self) -> None:
        """Returns once the present state is written."""
        assert self._commits is not None
        await self._commits.settle()

    def watch(self) -> None:
        """Writes the state if it changed, and starts a standby if none runs."""
        assert self._commits is not None
        self._commits.commit_in_passing()
        if self._standby is not None and not self._standby.ended:
            return
        if time.monotonic() - self._started < AGAIN_SECONDS:
            return
        if self._standby is not None:
            log.warning("%s %s; another one starts", self._standby, self._standby.ended)
        assert self._file is not None
        self._started = time.monotonic()
        self._standby = start(
            "the coordinator's standby",
            replace(self._settings, predecessor=os.getpid(), state=str(self._file.path)),
        )

    def listen(self, act: Callable[[int], None], leave: Callable[[], None]) -> None:
        """Reads the guardian's orders on the running loop.

        Args:
            act: Called with the number of each signal that the guardian received.
            leave: Called once the guardian has ended.
        """
        loop, left = asyncio.get_running_loop(), b""

        def read() -> None:
            nonlocal left
            chunk = os.read(self._settings.orders, 4096)
            *lines, left = (left + chunk).split(b"\n")
            for line in lines:
                act(int(line))
            if not chunk:
                loop.remove_reader(self._settings.orders)
                self._orphaned = time.monotonic()
                leave()

        loop.add_reader(self._settings.orders, read)

    @property
    def abandoned(self) -> bool:
        """Whether a server without a job should end: its guardian was killed, and no worker came since."""
        return time.monotonic() - self._orphaned > ORPHAN_SECONDS

    def end(self) -> None:
        """Ends the standby and deletes the state."""
        if self._standby is not None:
            self._standby.signal(signal.SIGKILL)  # it has nothing to clean up
            self._standby.wait()
        if self._file is not None:
            self._file.remove()


def report(settings: Settings, ended: Report) -> bool:
    """Sends the guardian how the server ended; returns False if the guardian is gone."""
    try:
        os.write(settings.report, msgspec.json.encode(ended) + b"\n")
    except BrokenPipeError:
        return False
    return True
