"""Hosts of a run's programs: all on this machine, or each on its own host behind a link."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.hardship.network import Host, network, why_not

HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of one run by role: "server" (the coordinator and the first shard), "shard 1", "worker 0".

    Attributes:
        behind_links: Hosts with links, by role; empty: all programs run on this machine.
    """

    behind_links: Mapping[str, Host] = field(default_factory=dict)

    @property
    def apart(self) -> bool:
        """Whether the server, further shards and workers have their own hosts."""
        return bool(self.behind_links)

    def local_rank(self, rank: int) -> int:
        """Returns a worker's number among those of its host."""
        return 0 if self.behind_links else rank

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs a program on a role's host, in the started process itself."""
        return self.behind_links[role].command(*argv) if self.behind_links else list(argv)

    def address(self, role: str) -> str:
        """Returns the address at which a role's programs listen."""
        return self.behind_links[role].address if self.behind_links else HERE

    def traffic(self, role: str) -> tuple[int, int] | None:
        """Returns bytes received and sent over a role's link, with headers; None without a link."""
        return self.behind_links[role].traffic() if self.behind_links else None


def check(setting: Setting) -> None:
    """Checks that a setting's hosts are available, before anything runs.

    Raises:
        UsageError: As `hosts` does.
    """
    if setting.link is not None and (reason := why_not(setting.link)):
        raise UsageError(
            f"the link {setting.link} is not available here: {reason}. Run as root on Linux with iproute2"
            " (ip, tc), or remove the link"
        )


@contextlib.contextmanager
def hosts(setting: Setting) -> Iterator[Hosts]:
    """Provides the hosts of a setting while the block runs.

    Programs must end before the block. On a host that is not this machine, `ps-server` needs `--host ADDRESS
    --insecure`, and further shards start with `--join`.

    Raises:
        UsageError: There is a link, and networks cannot be built here.
        HubringError: A network could not be built, or failed later.
    """
    check(setting)
    if setting.link is None:
        yield Hosts()
        return
    roles = roles_of(setting)
    with network(len(roles), setting.link) as members:
        yield Hosts(dict(zip(roles, members, strict=True)))


def roles_of(setting: Setting) -> list[str]:
    """Returns the roles with a host: the server, further shards, workers."""
    shards = [f"shard {number}" for number in range(1, setting.servers)]
    return ["server", *shards, *(f"worker {rank}" for rank in range(setting.workers))]
