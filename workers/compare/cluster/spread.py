"""Which program of a run belongs to which task. Pure.

Law: worker r is task r's. The server and the first shard are task 0's, further shards go from machine to
machine in the order of ranks, each to the first task there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ps.errors import UsageError
from workers.compare.cluster.messages import Hello

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
        return list(self._ranks().values())

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
            host: {
                "ranks": ", ".join(map(str, ranks)),
                **{name: self.members[ranks[0]].machine[name] for name in ("processor", "cores", "system")},
            }
            for host, ranks in self._ranks().items()
        }
        return {**self.members[0].machine, "launcher": self.launcher, "hosts": hosts}

    def _ranks(self) -> dict[str, list[int]]:
        """The ranks of every machine."""
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.host, []).append(member.rank)
        return found
