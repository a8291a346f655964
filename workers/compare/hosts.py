"""Hosts: where the programs of a run are started, and under which address they are reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from ps.errors import UsageError
from workers.compare.setting import Setting


class Hosts(Protocol):
    """The machines of one run. Roles are `server`, which has shard 0, `shard 1`, `worker 2` and so on."""

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """What runs a program on its role's host."""

    def address(self, role: str) -> str:
        """Under which address the others reach that host."""


class ThisMachine:
    """All programs on one host, and its loopback as the wire."""

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def address(self, role: str) -> str:
        return "127.0.0.1"


@contextlib.contextmanager
def hosts(setting: Setting) -> Iterator[Hosts]:
    """The hosts of a setting, for as long as the `with` block lasts.

    Raises:
        UsageError: They cannot be had here.
    """
    if setting.link is not None:
        raise UsageError(f"link {setting.link}: this machine has no hosts of their own")
    yield ThisMachine()
