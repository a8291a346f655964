"""Where runs take place: all on this machine, or over the tasks of a cluster (`compare.cluster`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.hardship.hosts import hosts
from hubring.workers.compare.peers.programs import Hosts
from hubring.workers.compare.run import machine
from hubring.workers.compare.run.noise import Listener, Noise, is_idle
from hubring.workers.compare.run.process import Process, Start


class Site(Protocol):
    """What starts programs, and hears what else happens where they run."""

    def hosts(self, setting: Setting) -> AbstractContextManager[Hosts]:
        """The hosts that a setting asks for, for as long as the block lasts."""

    def threads(self, workers: int) -> int:
        """PyTorch's in each of so many workers, so that none has to wait for a core."""

    def starter(self, threads: int) -> Start:
        """What starts a program, by its name, where it belongs.

        Args:
            threads: PyTorch's.
        """

    def busy(self) -> list[str]:
        """The names of its machines that are not at rest before the first run."""

    def listen(self) -> Callable[[], Noise]:
        """Listens from now on; called when the programs have ended, what it returns says what was heard."""


class ThisMachine:
    """All programs are children of this process, behind links or not."""

    def hosts(self, setting: Setting) -> AbstractContextManager[Hosts]:
        return hosts(setting)

    def threads(self, workers: int) -> int:
        return max(1, machine.cores() // workers)

    def starter(self, threads: int) -> Start:
        return Process

    def busy(self) -> list[str]:
        return [] if is_idle() else ["this machine"]

    def listen(self) -> Callable[[], Noise]:
        return Listener().noise
