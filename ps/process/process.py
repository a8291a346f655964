"""A process of this host that need not be a child of this one."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, as another process of this host can name it.

    Attributes:
        pid: Its process id.
        started: When it started, in clock ticks since the host's start: its number may be used again.
    """

    pid: int
    started: int

    @property
    def age(self) -> float:
        """Seconds since it started; very many if that is unknown."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / os.sysconf("SC_CLK_TCK")


def process(pid: int) -> Process:
    """Returns the process with this id; it has ended if there is none."""
    return Process(pid, _started(pid))


class Adopted:
    """A process whose parent has ended, watched and ended like a child.

    Args:
        name: Its display name.
        process: The process. It may have ended.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.pid, self.process = name, process.pid, process
        self._descriptor = _open(process)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def ended(self) -> str:
        """A clause if it has ended; empty while it runs. Only its parent learns its exit code."""
        return "" if self._descriptor is not None and not self.wait(0.0) else "has ended"

    def wait(self, seconds: float) -> bool:
        """Returns whether it ends within `seconds`."""
        if self._descriptor is None:
            return True
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(1e3 * seconds))

    def ask_to_stop(self) -> None:
        """Asks it to stop."""
        self._signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """Waits `seconds` for its end, then kills it."""
        if not self.wait(seconds):
            self._signal(signal.SIGKILL)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _signal(self, number: int) -> None:
        if self._descriptor is not None and not self.wait(0.0):
            signal.pidfd_send_signal(self._descriptor, number)


def _open(process: Process) -> int | None:
    """Returns a descriptor of the process, or None if it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.started and _started(process.pid) == process.started:  # compared once the number is held
        return descriptor
    os.close(descriptor)
    return None


def _started(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[19])  # the field `starttime`
