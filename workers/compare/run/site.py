"""Where runs take place: on this machine, or on the tasks of a cluster (`compare.cluster`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hubring.ps.core.clock_offset import Offset
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.hardship.hosts import hosts
from hubring.workers.compare.peers.programs import Hosts
from hubring.workers.compare.run import machine
from hubring.workers.compare.run.noise import Listener, Noise, is_idle, of_machine
from hubring.workers.compare.run.process import Process, Start


class Site(Protocol):
    """Starts programs and measures noise where they run."""

    def hosts(self, setting: Setting) -> AbstractContextManager[Hosts]:
        """Provides the hosts of a setting while the block runs."""

    def threads(self, workers: int) -> int:
        """Returns PyTorch threads per worker, so that no worker has to wait for a core."""

    def starter(self, threads: int) -> Start:
        """Returns a function that starts a program on its host.

        Args:
            threads: PyTorch threads of the program.
        """

    def busy(self) -> list[str]:
        """Returns the names of the machines that are not idle before the first run."""

    def listen(self) -> Callable[[], Sequence[Noise]]:
        """Starts to measure noise. Call the result for each machine's once the programs have ended."""

    def clocks(self) -> Mapping[str, Offset]:
        """Measures how far the server's clock is ahead of each machine's, by `name_kernel`."""


class ThisMachine:
    """Runs all programs as children of this process, with or without links."""

    def hosts(self, setting: Setting) -> AbstractContextManager[Hosts]:
        return hosts(setting)

    def threads(self, workers: int) -> int:
        return max(1, machine.cores() // workers)

    def starter(self, threads: int) -> Start:
        return Process

    def busy(self) -> list[str]:
        return [] if is_idle() else ["this machine"]

    def listen(self) -> Callable[[], Sequence[Noise]]:
        listener = Listener()
        return lambda: [of_machine([listener.sample()])]

    def clocks(self) -> Mapping[str, Offset]:
        return {}
