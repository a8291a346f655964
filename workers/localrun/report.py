"""What `ps-run` prints about a job on standard error: a first line, failures, and a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from signal import SIGINT
from typing import Any

from hubring.ps.core.errors import Preempted
from hubring.ps.process.child import Child
from hubring.workers.localrun.settings import Settings
from hubring.workers.localrun.team import Verdict

MOST_METRICS = 4
_STOPPED = {Preempted.exit_code: "stopped on request", 128 + SIGINT: "interrupted"}


class Report:
    """Prints the lines of one job.

    Args:
        size: Number of workers.
        settings: The job's settings.
    """

    def __init__(self, size: int, settings: Settings) -> None:
        self._size, self._settings = size, settings
        self._began = time.monotonic()

    def starting(self) -> None:
        """Prints what starts. Call it first: server and workers need seconds to import torch."""
        topology, mode = self._settings.topology, self._settings.mode
        how = topology if topology == "ring" else f"{topology}, {mode}"
        _print(f"starting 1 server, {_workers(self._size)} ({how})")

    def page(self, banner: str) -> None:
        """Prints the address of the status page, which the server's banner holds."""
        for line in banner.splitlines():
            name, _, address = line.strip().partition(" ")
            if name == "page":
                _print(f"status page: {address.strip()}")

    def failure(self, say: Callable[[str], None], child: Child, verdict: Verdict) -> None:
        """Prints that a worker or the server failed, and what happens next."""
        say(f"ps-run: {child.name} {child.ended}; {verdict}")

    def restart(self, cause: str, pause: float, left: int, start: str) -> None:
        """Prints that the job starts again.

        Args:
            cause: What ended it, as a clause.
            pause: Seconds until the restart.
            left: How many more restarts are allowed without a newer checkpoint.
            start: Where the job starts, in words.
        """
        _print(f"{cause}; restarting the job in {pause:g} s {start} ({_count(left, 'restart')} left)")

    def final(self, restarts: int, *, saves: bool) -> None:
        """Prints why a job that lost a process does not start again."""
        if restarts:
            _print(f"no restart is left after {restarts}; --restarts N sets their number")
        elif not saves:
            _print("the job is lost; with --checkpoint-dir DIR it starts again from its last checkpoint")

    def end(self, code: int, results: Mapping[int, Mapping[str, Any]], restarts: int) -> None:
        """Prints the summary.

        Args:
            code: The job's exit code.
            results: Rank to the worker's result; workers that did not join are missing.
            restarts: How often the job was restarted.
        """
        seconds = time.monotonic() - self._began
        steps = sorted({result["steps"] for result in results.values()})
        done = f" {'-'.join(map(str, [*steps[:1], *steps[1:][-1:]]))} steps" if steps else ""
        took = f"{seconds:.1f} s" + (f" with {_count(restarts, 'restart')}" if restarts else "")
        if not code:
            _print(f"{_workers(self._size)} finished{done} in {took}{_metrics(results)}")
        elif code in _STOPPED:
            _print(f"{_STOPPED[code]} after{done or ' 0 steps'} and {took} (exit code {code})")
        else:
            _print(f"failed after {took} (exit code {code})")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _workers(count: int) -> str:
    return _count(count, "worker")


def _metrics(results: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what the lowest rank reported last."""
    if not results:
        return ""
    rank = min(results)
    metrics = list(results[rank]["metrics"].items())[:MOST_METRICS]
    shown = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics
    )
    return f"; rank {rank}: {shown}" if shown else ""


def _print(text: str) -> None:
    print(f"ps-run: {text}", file=sys.stderr, flush=True)
