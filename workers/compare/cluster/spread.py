"""Which program of a run belongs to which task. Pure.

Law: worker r is task r's. The server and the first shard are task 0's, further shards go from machine to
machine in the order of ranks, each to the first task there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cluster.messages import Hello

_SAME = ("hubring", "torch")
"""What all machines must have in one version."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The tasks as hosts of a run.

    Attributes:
        members: By rank.
        launcher: Who started them.
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
                        f" {member.host}: install the same version everywhere"
                    )

    @property
    def apart(self) -> bool:
        """Each program is reached by its machine's address."""
        return True

    def rank_of(self, role: str) -> int:
        """Whose a program is: "server", "shard 1", "worker 0"."""
        kind, _, number = role.partition(" ")
        if kind == "worker":
            return int(number)
        machines = self.machines()
        return machines[int(number or 0) % len(machines)][0]

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """What runs a program: whoever starts it is where it belongs."""
        return list(argv)

    def address(self, role: str) -> str:
        """Where a role's programs listen, and where others reach them."""
        return self.members[self.rank_of(role)].address

    def local_rank(self, rank: int) -> int:
        """As the launcher says."""
        return self.members[rank].local_rank

    def machines(self) -> list[list[int]]:
        """The ranks of every machine, the conductor's first."""
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.boot, []).append(member.rank)
        return list(found.values())

    def busy(self) -> list[str]:
        """The machines that were not at rest when their tasks came."""
        return [
            self._name(ranks)
            for ranks in self.machines()
            if not all(self.members[rank].idle for rank in ranks)
        ]

    def threads(self, workers: int) -> int:
        """PyTorch's in each of so many workers: the fewest cores that a machine has for each of its own."""
        shares = []
        for ranks in self.machines():
            here = sum(rank < workers for rank in ranks)
            cores = {core for rank in ranks for core in self.members[rank].cores}
            shares += [len(cores) // here] if here else []
        return max(1, min(shares))

    def machine(self) -> dict[str, Any]:
        """What the comparison runs on: the first machine, and each by name."""
        hosts = {
            self._name(ranks): {
                "ranks": ", ".join(map(str, ranks)),
                **{name: self.members[ranks[0]].machine[name] for name in ("processor", "cores", "system")},
            }
            for ranks in self.machines()
        }
        return {**self.members[0].machine, "launcher": self.launcher, "hosts": hosts}

    def _name(self, ranks: Sequence[int]) -> str:
        """A machine's, which is that of its containers; with its address where another has the same."""
        hosts = dict.fromkeys(self.members[rank].host for rank in ranks)
        name, first = ", ".join(hosts), self.members[ranks[0]]
        shared = any(member.host in hosts and member.boot != first.boot for member in self.members)
        return f"{name} at {first.address}" if shared else name
