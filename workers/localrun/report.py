"""What `ps-run` prints about a job on standard error: a first line, failures, and a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from signal import SIGINT
from typing import Any

from hubring.ps.core.errors import Preempted
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

    def failure(self, say: Callable[[str], None], rank: int, code: int, verdict: Verdict) -> None:
        """Prints that a worker failed, and what happens next."""
        say(f"ps-run: rank {rank} exited with {code}; {verdict}")

    def end(self, code: int, results: Mapping[int, Mapping[str, Any]]) -> None:
        """Prints the summary.

        Args:
            code: The job's exit code.
            results: Rank to the worker's result; workers that did not join are missing.
        """
        seconds = time.monotonic() - self._began
        steps = sorted({result["steps"] for result in results.values()})
        done = f" {'-'.join(map(str, [*steps[:1], *steps[1:][-1:]]))} steps" if steps else ""
        if not code:
            _print(f"{_workers(self._size)} finished{done} in {seconds:.1f} s{_metrics(results)}")
        elif code in _STOPPED:
            _print(f"{_STOPPED[code]} after{done or ' 0 steps'} and {seconds:.1f} s (exit code {code})")
        else:
            _print(f"failed after {seconds:.1f} s (exit code {code})")


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


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
