"""Where the programs of a run are: all on this machine, or each on a host of its own behind a link."""

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
        behind_links: Whose host has a link; empty: nobody's, all are on this machine.
    """

    behind_links: Mapping[str, Host] = field(default_factory=dict)

    @property
    def apart(self) -> bool:
        """Whether the server, further shards and workers are on hosts of their own."""
        return bool(self.behind_links)

    def local_rank(self, rank: int) -> int:
        """A worker's number among those of its host."""
        return 0 if self.behind_links else rank

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """What runs a program on a role's host. The process that is started becomes the program itself."""
        return self.behind_links[role].command(*argv) if self.behind_links else list(argv)

    def address(self, role: str) -> str:
        """Where a role's programs listen, and where others reach them."""
        return self.behind_links[role].address if self.behind_links else HERE

    def traffic(self, role: str) -> tuple[int, int] | None:
        """Bytes that a role's link has brought and taken, headers included; None: it has no link."""
        return self.behind_links[role].traffic() if self.behind_links else None


def check(setting: Setting) -> None:
    """Makes sure that a setting's hosts can be had, before anything is run for it.

    Raises:
        UsageError: As `hosts` does.
    """
    if setting.link is not None and (reason := why_not(setting.link)):
        raise UsageError(
            f"the link {setting.link} was asked for, but {reason}: run as root on Linux with iproute2"
            " (ip, tc), or leave out the link"
        )


@contextlib.contextmanager
def hosts(setting: Setting) -> Iterator[Hosts]:
    """The hosts that a setting asks for, for as long as the block lasts.

    Programs are to end before it does. On a host that is not this machine `ps-server` needs `--host
    ADDRESS --insecure`, and further shards are started with `--join`.

    Raises:
        UsageError: There is a link, and networks cannot be built here; says why, and the mend.
        HubringError: A network could not be built, or failed on the way.
    """
    check(setting)
    if setting.link is None:
        yield Hosts()
        return
    roles = roles_of(setting)
    with network(len(roles), setting.link) as members:
        yield Hosts(dict(zip(roles, members, strict=True)))


def roles_of(setting: Setting) -> list[str]:
    """Who has a host: the server, further shards, workers."""
    shards = [f"shard {number}" for number in range(1, setting.servers)]
    return ["server", *shards, *(f"worker {rank}" for rank in range(setting.workers))]
