"""Maps the programs of a run to tasks. Pure.

Law: worker r runs on task r. The server and the first shard run on task 0. Further shards go from machine to
machine in the order of ranks, each to the first task there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cluster.messages import Hello

_SAME = ("hubring", "torch")
"""Packages whose versions must be equal on all machines."""

_SHOWN = ("processor", "cores", "gpus", "system")
"""What the report shows of each machine."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The tasks as hosts of a run.

    Attributes:
        members: First messages of the tasks, by rank.
        launcher: Name of the launcher.
    """

    members: Sequence[Hello]
    launcher: str

    def __post_init__(self) -> None:
        first, *others = self.members
        for member in others:
            for name in _SAME:
                if member.machine[name] != first.machine[name]:
                    raise UsageError(
                        f"{name} is {first.machine[name]} on {first.host} and {member.machine[name]} on"
                        f" {member.host}; install the same version on all machines"
                    )

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

    def busy(self) -> list[str]:
        """Returns the machines that were not idle when their tasks joined."""
        return [
            self.name(ranks)
            for ranks in self.machines()
            if not all(self.members[rank].idle for rank in ranks)
        ]

    def threads(self, workers: int) -> int:
        """Returns PyTorch threads per worker: the fewest cores per worker of any machine."""
        shares = []
        for ranks in self.machines():
            here = sum(rank < workers for rank in ranks)
            cores = {core for rank in ranks for core in self.members[rank].cores}
            shares += [len(cores) // here] if here else []
        return max(1, min(shares))

    def machine(self) -> dict[str, Any]:
        """Returns the description of the first machine, and of each machine by name."""
        hosts = {
            self.name(ranks): {
                "ranks": ", ".join(map(str, ranks)),
                **{name: value for name, value in self.members[ranks[0]].machine.items() if name in _SHOWN},
            }
            for ranks in self.machines()
        }
        return {**self.members[0].machine, "launcher": self.launcher, "hosts": hosts}

    def name(self, ranks: Sequence[int]) -> str:
        """Returns a machine's name, with its address if another machine has the same name."""
        hosts = dict.fromkeys(self.members[rank].host for rank in ranks)
        name, first = ", ".join(hosts), self.members[ranks[0]]
        shared = any(member.host in hosts and member.boot != first.boot for member in self.members)
        return f"{name} at {first.address}" if shared else name
