"""Reads `horovodrun`'s host lists. `ps-run` accepts only this machine."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

from hubring.ps.core.errors import UsageError

ELSEWHERE = (
    "ps-run starts workers only on this machine; for several machines, start ps-server on one of them, and"
    " ps-worker with the cluster's launcher: srun, torchrun, mpirun, or Kubernetes"
)


def room(hosts: str | None, hostfile: Path | str | None, script: str | None, default: int = 1) -> int | None:
    """Returns the number of worker slots; None without hosts.

    Args:
        hosts: A list such as `localhost:4`, separated by commas.
        hostfile: A file with lines such as `localhost slots=4`.
        script: A program that prints lines such as `localhost:4`; it runs once.
        default: Slots of a host without a number.

    Raises:
        UsageError: Two options name hosts, a host is another machine, or a host is malformed.
    """
    ways = {"--hosts": hosts, "--hostfile": hostfile, "--host-discovery-script": script}
    given = [way for way, value in ways.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both set the hosts; remove all but one")
    if hosts:
        return _total(hosts.split(","), default)
    if hostfile:
        return _total(_lines_of(Path(hostfile)), default)
    return _total(_output_of(script), default) if script else None


def _lines_of(hostfile: Path) -> list[str]:
    if not hostfile.is_file():
        raise UsageError(f"--hostfile {hostfile}: the file does not exist")
    lines = [line.partition("#")[0].strip() for line in hostfile.read_text().splitlines()]
    return [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]


def _output_of(script: str) -> list[str]:
    flag = f"--host-discovery-script {script}"
    try:
        # A command for the shell, as in Horovod: it can have arguments, and a script needs no first line #!.
        command = ["/bin/sh", "-c", script]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"{flag}: /bin/sh cannot be run: {error.strerror}") from error
    if done.returncode:
        raise UsageError(f"{flag}: the script exited with {done.returncode}: {done.stderr.strip()}")
    return [line for line in done.stdout.splitlines() if line.strip()]


def _total(hosts: list[str], default: int) -> int:
    return sum(_slots(one, default) for one in hosts)


def _slots(text: str, default: int) -> int:
    match = re.fullmatch(r"(?P<host>[^\s:]+)(:(?P<slots>[1-9][0-9]*))?", text.strip())
    if match is None:
        raise UsageError(f"host {text!r}: expected HOST:SLOTS, as in localhost:4")
    if match["host"] not in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        raise UsageError(f"host {match['host']!r} is another machine; {ELSEWHERE}")
    return int(match["slots"] or default)
