"""A real SLURM of four nodes on this machine: munged, slurmctld and four slurmd in a folder of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes.stopwatch import Stopwatch

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "squeue")
NODES = 4
PATIENCE = 90.0
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16999
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=120
NodeName=n[0-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17000-17003] CPUs=4 RealMemory=1000
PartitionName=all Nodes=n[0-3] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The cluster; `environment` is what its commands, and the jobs they start, want."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "slurm.conf"
        host, self._user = socket.gethostname().partition(".")[0], Path("/proc/self").owner()
        config.write_text(CONFIG.format(host=host, user=self._user, folder=folder))
        own = {"PATH": PATH, "SLURM_CONF": str(config), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **own}
        self._daemons: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def missing() -> list[str]:
        return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        socket_ = self.folder / "munge.socket"
        own = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={socket_}", *own)
        self.until(socket_.exists, "munged's socket")
        self._daemon("slurmctld", "-D")
        for number in range(NODES):
            (self.folder / "spool" / f"n{number}").mkdir(parents=True)
            self._daemon("slurmd", "-D", "-N", f"n{number}")
        self.until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(NODES), "four idle nodes")

    def stop(self) -> None:
        """Ends what still runs, then the daemons, the first one last."""
        if len(self._daemons) > 1:
            subprocess.run(
                ["scancel", f"--user={self._user}", "--signal=KILL"], env=self.environment, timeout=30
            )
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str) -> str:
        """What a command prints; empty if it fails, as while slurmctld starts."""
        asked = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return asked.stdout.strip()

    def batch(self, script: Path, folder: Path) -> str:
        """Queues a batch script that runs in `folder`; returns the job's number."""
        job = self.ask("sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/job.out", str(script))
        assert job.isdecimal(), self.said()
        return job

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        watch = Stopwatch()
        while not condition():
            assert watch.seconds < PATIENCE, f"no {what} within {PATIENCE} s:\n{self.said()}"
            time.sleep(0.2)

    def said(self) -> str:
        """The last lines of every daemon."""
        logs = sorted(self.folder.glob("*.out"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _daemon(self, *command: str) -> None:
        log = self.folder / f"{len(self._daemons)}-{command[0]}.out"
        with log.open("wb") as out:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self._daemons.append(subprocess.Popen(command, env=self.environment, **streams))
