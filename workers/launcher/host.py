"""On which hosts workers are to run, as `horovodrun` is told; here that is this one."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from ps.errors import UsageError

ELSEWHERE = (
    "ps-run starts workers on this machine alone. On several, start ps-server on one of them and let the"
    " cluster's launcher start ps-worker: srun, torchrun, mpirun, or Kubernetes"
)


def slots(hosts: str) -> int:
    """How many workers `localhost:4` has room for; without a number one.

    Raises:
        UsageError: It names another machine, or is not of that form.
    """
    return sum(_slots(one) for one in hosts.split(","))


def slots_in(hostfile: Path) -> int:
    """The same of a file with lines as `localhost slots=4`.

    Raises:
        UsageError: There is no such file, it names another machine, or a line is of another form.
    """
    if not hostfile.is_file():
        raise UsageError(f"--hostfile {hostfile}: there is no such file")
    lines = [line.partition("#")[0].strip() for line in hostfile.read_text().splitlines()]
    return sum(_slots(re.sub(r"\s+slots\s*=\s*", ":", line)) for line in lines if line)


def _slots(text: str) -> int:
    match = re.fullmatch(r"(?P<host>[^\s:]+)(:(?P<slots>[1-9][0-9]*))?", text.strip())
    if match is None:
        raise UsageError(f"host {text!r}: expected HOST:SLOTS, as in localhost:4")
    if match["host"] not in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        raise UsageError(f"host {match['host']!r} is another machine. {ELSEWHERE}")
    return int(match["slots"] or 1)
