"""A Docker engine of one's own: dockerd in namespaces that end with it, so that nothing it made remains.

Its bridges, firewall rules and mounts are in a network and a mount namespace, and its containers in a process
namespace, which the kernel ends with their first process. The rest is one folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.processes.process_tree import below
from tests.support.processes.stopwatch import Stopwatch

PROGRAMS = ("dockerd", "docker", "debootstrap", "unshare", "ip", "setpriv")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CGROUP = f"hubring-test-{os.getpid()}"
PATIENCE = 180.0
"""Seconds, by a stopwatch, in which engine and fleet do whatever they were asked for."""
CALL_SECONDS = 600.0
"""By the clock on the wall, for a client that waits for that."""


class Engine:
    """The daemon; `environment` is what its clients want."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("COMPOSE_", "DOCKER_", "PS_"))
        }
        host = f"unix://{folder}/docker.sock"
        self.environment = {
            **inherited,
            "PATH": PATH,
            "DOCKER_HOST": host,
            "DOCKER_CONFIG": str(folder / "config"),
        }
        self._command = [
            "dockerd",
            f"--host={host}",
            f"--data-root={folder}/data",
            f"--exec-root={folder}/run",
            f"--pidfile={folder}/dockerd.pid",
            f"--cgroup-parent=/{CGROUP}",
        ]
        self._log = folder / "dockerd.log"
        self._daemon: subprocess.Popen[bytes] | None = None

    @staticmethod
    def missing() -> list[str]:
        """What this machine lacks for an engine."""
        lacks = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
        if "docker" not in lacks:
            compose = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60)
            if compose.returncode != 0:
                lacks.append("docker compose, version 2")
        if os.geteuid() != 0:
            lacks.append("root, for whom alone dockerd starts,")
        return lacks

    def start(self) -> None:
        namespaces = ["--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        script = 'ip link set lo up && exec "$@"'
        # The kernel kills all of it with the tests.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces]
        with self._log.open("wb") as log:
            self._daemon = subprocess.Popen(
                [*command, "sh", "-c", script, "sh", *self._command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(lambda: self.ask("version").returncode == 0, "dockerd's answer", self.said)

    def stop(self) -> None:
        """Ends the daemon, with it all containers, and removes what it kept."""
        if self._daemon is not None:
            unshare = self._daemon.pid
            for dockerd in Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split():
                os.kill(int(dockerd), signal.SIGTERM)
            try:
                self._daemon.wait(60)
            except subprocess.TimeoutExpired:
                self._daemon.kill()  # who is in the namespace goes with it
                self._daemon.wait()
        for folder in (self.folder / "data", self.folder / "run"):
            if folder.exists():
                shutil.rmtree(folder)
        root = Path("/sys/fs/cgroup")
        for group in sorted({*root.glob(f"{CGROUP}/**/"), *root.glob(f"*/{CGROUP}/**/")}, reverse=True):
            group.rmdir()

    def processes(self) -> list[int]:
        """The processes in its containers, and its own."""
        assert self._daemon is not None
        return below(self._daemon.pid)

    def run(self, *arguments: str, **variables: str) -> str:
        """What a client prints on standard output; it has to succeed."""
        ran = self.ask(*arguments, **variables)
        assert ran.returncode == 0, f"docker {' '.join(arguments)}:\n{ran.stdout[-4000:]}{ran.stderr[-8000:]}"
        return ran.stdout

    def ask(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """How a client ends that may fail."""
        return subprocess.run(
            ["docker", *arguments],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=CALL_SECONDS,
        )

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def until(condition: Callable[[], bool], what: str, said: Callable[[], str]) -> None:
    """Waits for a condition that takes its time to find out."""
    watch = Stopwatch()
    while not condition():
        assert watch.seconds < PATIENCE, f"no {what} within {PATIENCE} s:\n{said()}"
        time.sleep(0.2)
