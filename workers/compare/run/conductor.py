"""The conductor: rank 0, which runs the plan and lets every task start its own programs.

Law: worker r runs on task r. The server and the first shard run on task 0. Further shards go from machine to
machine in the order of ranks, each to the first task there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.core.timing import ClockOffset
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.run import noise
from hubring.workers.compare.run.follower import FollowerHandle, RemoteProgram
from hubring.workers.compare.run.link import Hello, Listen, Over
from hubring.workers.compare.run.meeting import LauncherTask, describe_task, invite
from hubring.workers.compare.run.noise import NoiseListener, RunNoise
from hubring.workers.peers.processes import LocalProcess, RunProcess, StartProgram

_SAME = ("hubring", "torch")
"""Packages whose versions must be equal on all machines."""

_SHOWN = ("processor", "cores", "gpus", "system")
"""What the report shows of each machine."""


class Conductor:
    """The tasks as hosts of a run, and what `site.ThisMachine` is for one machine.

    Args:
        members: First messages of the tasks, by rank.
        launcher: Name of the launcher.
        followers: The other tasks by rank; owned by the caller.

    Attributes:
        code: Exit code of all tasks: 1 until the caller sets another.

    Raises:
        UsageError: Two machines have different versions.
    """

    def __init__(
        self, members: Sequence[Hello], launcher: str, followers: Mapping[int, FollowerHandle]
    ) -> None:
        first, *others = members
        for member in others:
            for name in _SAME:
                if member.machine[name] != first.machine[name]:
                    raise UsageError(
                        f"{name} is {first.machine[name]} on {first.host} and {member.machine[name]} on"
                        f" {member.host}; install the same version on all machines"
                    )
        self.members, self._launcher, self._followers = members, launcher, followers
        self._used: set[int] = set()
        """Ranks that have started programs since the last call of `listen`."""
        self.code = 1

    @property
    def apart(self) -> bool:
        """Programs reach each other by address."""
        return True

    def rank_of(self, role: str) -> int:
        """Returns the rank that runs a program: "server", "shard 1" or "worker 0"."""
        kind, _, number = role.partition(" ")
        if kind == "worker":
            return int(number)
        machines = self.machines()
        return machines[int(number or 0) % len(machines)][0]

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """Returns the command unchanged: the task that starts it is on the right host."""
        return list(argv)

    def address(self, role: str) -> str:
        """Returns the address at which a role's programs listen."""
        return self.members[self.rank_of(role)].address

    def local_rank(self, rank: int) -> int:
        """Returns the local rank from the launcher."""
        return self.members[rank].local_rank

    def machines(self) -> list[list[int]]:
        """Returns the ranks of every machine, the conductor's machine first."""
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.boot, []).append(member.rank)
        return list(found.values())

    def threads(self, workers: int) -> int:
        """Returns PyTorch threads per worker: the fewest cores per worker of any machine."""
        shares = []
        for ranks in self.machines():
            here = sum(rank < workers for rank in ranks)
            cores = {core for rank in ranks for core in self.members[rank].cores}
            shares += [len(cores) // here] if here else []
        return max(1, min(shares))

    @property
    def machine(self) -> dict[str, Any]:
        """The description of the first machine, and of each machine by name."""
        hosts = {
            self.name(ranks): {
                "ranks": ", ".join(map(str, ranks)),
                **{name: value for name, value in self.members[ranks[0]].machine.items() if name in _SHOWN},
            }
            for ranks in self.machines()
        }
        return {**self.members[0].machine, "launcher": self._launcher, "hosts": hosts}

    def name(self, ranks: Sequence[int]) -> str:
        """Returns a machine's name, with its address if another machine has the same name."""
        hosts = dict.fromkeys(self.members[rank].host for rank in ranks)
        name, first = ", ".join(hosts), self.members[ranks[0]]
        shared = any(member.host in hosts and member.boot != first.boot for member in self.members)
        return f"{name} at {first.address}" if shared else name

    def hosts(self, setting: Setting) -> contextlib.nullcontext[Conductor]:
        """Provides the tasks, whatever the setting."""
        return contextlib.nullcontext(self)

    def starter(self, threads: int) -> StartProgram:
        def start(
            name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
        ) -> RunProcess:
            rank = self.rank_of(name)
            self._used.add(rank)
            if rank == 0:
                return LocalProcess(name, command, directory, environment)
            return RemoteProgram(name, command, directory, self._followers[rank], threads)

        return start

    def listen(self) -> Callable[[], list[RunNoise]]:
        """Measures noise on all machines; returns that of those with programs, or of all if none ran."""
        self._used.clear()
        here = NoiseListener()
        for member in self._followers.values():
            member.order(Listen())

        def heard() -> list[RunNoise]:
            samples = {0: here.sample()} | {rank: each.sample() for rank, each in self._followers.items()}
            return [
                noise.of_machine([samples[rank] for rank in ranks], self.name(ranks))
                for ranks in self.machines()
                if not self._used or not self._used.isdisjoint(ranks)
            ]

        return heard

    def clocks(self) -> dict[str, ClockOffset]:
        own, *others = self.machines()
        found = {self.members[own[0]].boot: ClockOffset(0, 0)}
        for first, *_ in others:
            found[self.members[first].boot] = self._followers[first].clock_offset()
        return found


@contextlib.contextmanager
def conduct(task: LauncherTask, folder: Path) -> Iterator[Conductor]:
    """Waits for all followers; at the end of the block sends them the exit code.

    Args:
        task: Rank 0's.
        folder: Folder that all machines share; created if missing.

    Raises:
        HubringError: Some followers did not join.
        UsageError: They do not match.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = describe_task(task, None)
    joined = invite(task, folder, own.address)
    members = {rank: FollowerHandle(*joined[rank]) for rank in sorted(joined)}
    code = 1
    try:
        hellos = [own, *(member.hello for member in members.values())]
        conductor = Conductor(hellos, task.launcher, members)
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
