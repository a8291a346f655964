"""The conductor: rank 0, which runs the plan and lets every task start its own programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hubring.ps.core.clock_offset import Offset
from hubring.ps.core.errors import HubringError
from hubring.workers.compare.cluster.host import describe
from hubring.workers.compare.cluster.meeting import invite
from hubring.workers.compare.cluster.member import Member, Remote
from hubring.workers.compare.cluster.messages import Over
from hubring.workers.compare.cluster.spread import Spread
from hubring.workers.compare.cluster.task import Task
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.run import noise
from hubring.workers.compare.run.noise import Listener, Noise
from hubring.workers.compare.run.process import Process, RunProcess, Start


class Conductor:
    """A `hubring.workers.compare.run.site.Site` of many machines.

    Args:
        spread: Maps programs to ranks.
        members: The followers by rank; owned by the caller.

    Attributes:
        code: Exit code of all tasks: 1 until the caller sets another.
    """

    def __init__(self, spread: Spread, members: Mapping[int, Member]) -> None:
        self._spread = spread
        self._members = members
        self._used: set[int] = set()
        """Ranks that have started programs since the last call of `listen`."""
        self.code = 1

    @property
    def machine(self) -> dict[str, Any]:
        """The machines, for the report."""
        return self._spread.machine()

    @contextlib.contextmanager
    def hosts(self, setting: Setting) -> Iterator[Spread]:
        """Provides the tasks, whatever the setting."""
        yield self._spread

    def threads(self, workers: int) -> int:
        return self._spread.threads(workers)

    def starter(self, threads: int) -> Start:
        def start(
            name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
        ) -> RunProcess:
            rank = self._spread.rank_of(name)
            self._used.add(rank)
            if rank == 0:
                return Process(name, command, directory, environment)
            return Remote(name, command, directory, self._members[rank], threads)

        return start

    def busy(self) -> list[str]:
        return self._spread.busy()

    def listen(self) -> Callable[[], list[Noise]]:
        """Measures noise on all machines; returns that of those on which programs ran."""
        self._used.clear()
        here = Listener()
        for member in self._members.values():
            member.listen()

        def heard() -> list[Noise]:
            samples = {0: here.sample()} | {rank: each.sample() for rank, each in self._members.items()}
            return [
                noise.of_machine([samples[rank] for rank in ranks], self._spread.name(ranks))
                for ranks in self._spread.machines()
                if not self._used.isdisjoint(ranks)
            ]

        return heard

    def clocks(self) -> dict[str, Offset]:
        own, *others = self._spread.machines()
        found = {self._spread.members[own[0]].boot: Offset(0, 0)}
        for first, *_ in others:
            found[self._spread.members[first].boot] = self._members[first].clock_offset()
        return found


@contextlib.contextmanager
def conduct(task: Task, folder: Path) -> Iterator[Conductor]:
    """Waits for all followers; at the end of the block sends them the exit code.

    Args:
        task: Rank 0's.
        folder: Folder that all machines share; created if missing.

    Raises:
        HubringError: Some followers did not join.
        UsageError: They do not match.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = describe(task, None)
    joined = invite(task, folder, own.address)
    members = {rank: Member(*joined[rank]) for rank in sorted(joined)}
    code = 1
    try:
        hellos = [own, *(member.hello for member in members.values())]
        conductor = Conductor(Spread(hellos, task.launcher), members)
        yield conductor
        code = conductor.code
    except HubringError as error:
        code = error.exit_code
        raise
    finally:
        for member in members.values():
            with contextlib.suppress(HubringError):  # a lost follower needs no message
                member.order(Over(code=code))
            member.close()
