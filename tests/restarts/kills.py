"""Jobs under `ps-run`, and a kill of any one of their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from hubring.ps.checkpoint.checkpoint_folder import newest_step
from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.process_tree import below, by_age, runs

PS_RUN = "hubring.workers.programs.ps_run"
STEPS = 80
FLAGS = {"hub": [], "aggregate": ["--aggregate"], "ring": ["--topology", "ring"]}
VICTIMS = {
    "hub": ("server", "shard", "worker"),
    "aggregate": ("server", "shard", "worker"),
    "ring": ("server", "worker"),
}
"""The processes of a job of each kind; of a ring, the server only lets its members meet."""
_MODULES = {
    "server": "hubring.ps.cli",
    "shard": "hubring.ps.shard.process",
    "worker": "hubring.workers.programs.ps_worker",
}


class Job:
    """A job of two workers in a folder, with checkpoints twice a second.

    Args:
        cluster: Starts it.
        folder: Its folder.
        kind: A key of `FLAGS`.
        more: More arguments of the script `small.py`.
        flags: More flags of `ps-run`.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, kind: str, *more: str, flags: Sequence[str] = ()
    ) -> None:
        folder.mkdir(parents=True)
        self.saved, self._final = folder / "saved", folder / "final.safetensors"
        self._workers_save = kind != "hub"
        saves = ["--checkpoint-dir", str(self.saved), "--checkpoint-every", "0.5"]
        script = [SMALL, str(STEPS), "16", *more]
        self.program: Program = cluster.run(
            f"{folder.parent.name}-{folder.name}",
            PS_RUN,
            *("-n", "2", *FLAGS[kind], *saves, *flags),
            *script,
            variables={"PS_SAVE_PARAMETERS": str(self._final)},
        )

    @property
    def step(self) -> int:
        """The step of the newest checkpoint; -1 without one."""
        step = newest_step(self.saved / "workers" if self._workers_save else self.saved)
        return -1 if step is None else step

    def processes(self, victim: str) -> list[int]:
        """Returns the live processes of a kind, the oldest first."""
        return by_age(pid for pid in below(self.program.process.pid) if runs(pid, _MODULES[victim]))

    def kill(self, victim: str, number: int = 0) -> int:
        """Kills a process of a kind as the kernel does when memory is short; returns its id, or 0."""
        found: Sequence[int] = self.processes(victim)
        if not found:
            return 0
        pid = found[number % len(found)]
        os.kill(pid, signal.SIGKILL)
        return pid

    @property
    def restarts(self) -> list[str]:
        """Returns the lines about restarts."""
        return [line for line in self.program.said().splitlines() if "; restarting the job in " in line]

    def until_saved(self, step: int) -> None:
        """Waits for a checkpoint of at least this step."""
        self.program.until(lambda: self.step >= step, f"checkpoint of step {step}")

    def until_restarted(self) -> None:
        """Waits until `ps-run` says that it starts the job again."""
        self.program.until(lambda: bool(self.restarts), "restart")

    def parameters(self) -> dict[str, Tensor]:
        """Waits until the job succeeds; returns its last parameters."""
        assert self.program.wait() == 0, self.program.said()
        return load_file(self._final)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of parameters have the same bytes."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
