"""Who listens on a port of this machine: by the kernel's tables of sockets and every process's open files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"
"""TCP_LISTEN, as /proc/net/tcp spells it."""

_WIDTH = 60


class Listener(NamedTuple):
    """The process that listens.

    Attributes:
        pid: Its id; None where this user may not see into the process.
        command: Its command line.
    """

    pid: int | None
    command: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is a `ps-server`."""
        return "ps-server" in self.command or "hubring.ps.cli" in self.command

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that this user may not see (as root: ss -ltnp)"
        short = self.command if len(self.command) <= _WIDTH else self.command[:_WIDTH] + "..."
        return f"pid {self.pid} ({short})"


def find(port: int, proc: Path = Path("/proc")) -> Listener | None:
    """Who listens on the port, at whatever address; None: nobody."""
    tables = [proc / "net" / name for name in ("tcp", "tcp6")]
    wanted = {inode for table in tables if table.exists() for inode in inodes(table.read_text(), port)}
    if not wanted:
        return None
    links = {f"socket:[{inode}]" for inode in wanted}
    for process in proc.iterdir():
        if process.name.isdigit() and links & _open_files(process):
            return Listener(int(process.name), _command(process))
    return Listener(None)


def inodes(table: str, port: int) -> list[str]:
    """The sockets that listen on a port, of what /proc/net/tcp or tcp6 holds (proc(5))."""
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            found.append(fields[9])
    return found


def _open_files(process: Path) -> set[str]:
    files = set()
    try:
        for descriptor in (process / "fd").iterdir():
            files.add(os.readlink(descriptor))
    except OSError:  # it ended meanwhile, or is another user's
        pass
    return files


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:  # it ended meanwhile
        return ""
