"""Jobs that `ps-server submit` sends to a real SLURM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

from hubring.ps.checkpoint.checkpoint_folder import newest_step
from tests.launchers.commands import told
from tests.launchers.slurm import Slurm
from tests.support.processes.cluster import SMALL
from tests.support.processes.process_tree import command, descendants, entry

RING = ["--topology", "ring"]


class Submitted:
    """A job that is submitted from a folder of its own, and its output there."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.slurm, self.folder = slurm, folder
        self.number = ""
        programs = str(Path(sys.executable).parent)  # ps-server and ps-worker are beside this Python
        self.environment = {**slurm.environment, "PATH": f"{programs}:{os.environ['PATH']}"}

    def submit(self, *words: str) -> dict[str, Any]:
        """By `ps-server submit`, which hands it to sbatch."""
        last = json.loads(self._run(*self._words(*words)).splitlines()[-1])
        self.number = last["said"].rpartition(" ")[2]
        assert self.number.isdecimal(), last
        return last

    def submit_printed(self, *words: str) -> None:
        """By sbatch, of the file that `ps-server submit --dry-run` prints."""
        script = self.folder / "job.sbatch"
        script.write_text(self._run(*self._words("--dry-run", *words)))
        self.number = self._run("sbatch", "--parsable", str(script)).strip()

    def until_said(self, words: str, count: int = 1) -> None:
        self._until(lambda: self.said().count(words) >= count, words)

    def until_saved(self, folder: str, step: int) -> None:
        """Waits for a checkpoint of at least this step in a folder of the job's."""
        self._until(lambda: (newest_step(self.folder / folder) or 0) >= step, f"checkpoint of step {step}")

    def until_state(self, *states: str) -> str:
        """Waits for one of these states; returns which."""
        seen: list[str] = []

        def reached() -> bool:
            seen.append(self.slurm.state(self.number))
            return seen[-1] in states

        self._until(reached, " or ".join(states))
        return seen[-1]

    def kill(self, program: str, which: int = 0, *variables: str) -> None:
        """Kills one of the job's processes of a program, as the kernel does when memory is short."""
        wanted = {f"SLURM_JOB_ID={self.number}", *variables}
        found = [pid for pid in descendants() if program in command(pid) and wanted <= variables_of(pid)]
        assert found, self.said()
        os.kill(sorted(found)[which % len(found)], SIGKILL)

    def complete_again(self) -> None:
        """Waits until SLURM has queued the job again, and the job has completed."""
        self.until_state("PENDING")
        # SLURM lets the old credential run out first, for two minutes; one of a later second replaces it too.
        self.slurm.ask("scontrol", "update", f"jobid={self.number}", "starttime=now+3")
        assert self.until_state("COMPLETED", "FAILED") == "COMPLETED", self.said()

    def ended(self) -> int:
        """Waits for the end; the exit code of the batch script."""
        self.until_state("COMPLETED", "FAILED", "CANCELLED")
        shown = self.slurm.ask("scontrol", "show", "job", self.number)
        return int(shown.partition("ExitCode=")[2].partition(":")[0])

    def said(self) -> str:
        out = self.folder / "job.out"
        return out.read_text() if out.exists() else ""

    def result(self) -> dict[str, Any]:
        """The server's, which is the job's last line."""
        last: dict[str, Any] = json.loads(self.said().splitlines()[-1])
        return last

    def _words(self, *words: str) -> list[str]:
        option = "#SBATCH --output=job.out"
        start = ["ps-server", "submit", "--engine", "slurm", "--workers", "4", "--nodes", "4"]
        return [*start, "--engine-option", option, *words]

    def _run(self, *words: str) -> str:
        ran = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self.slurm.until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None


def holding(job: Submitted, *words: str, steps: int = 40, at: int = 10) -> Path:
    """Submits a script, and waits until all workers hold; returns the file that lets them go."""
    go = job.folder / "go"
    job.submit_printed(*words, "--", SMALL, str(steps), "16", "hold", str(go), str(at))
    job.until_said(f"holding at {at}", 4)
    return go


def finished(job: Submitted, steps: int) -> None:
    assert job.ended() == 0, job.said()
    ranks = [(one["rank"], one["size"], one["steps"]) for one in told(job.said())]
    assert ranks == [(rank, 4, steps) for rank in range(4)]
    assert (job.result()["finished"], job.result()["exit_code"]) == ([0, 1, 2, 3], 0)
    assert not list(job.folder.glob("hubring-*"))


def variables_of(pid: int) -> set[str]:
    """Of a process; none if it has ended."""
    return set(entry(pid, "environ").split("\0"))
