"""Kills one process of each of many jobs at a random moment: python -m tests.restarts --kills 20."""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.restarts.kills import FLAGS, VICTIMS, Job, same
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.orphans import take_in_orphans

PACE = ("pace", "0.05")


@dataclass(frozen=True)
class Result:
    """How one job ended that lost a process.

    Attributes:
        victim: The kind of process.
        moment: Seconds from the start of the job to the kill.
        step: The step of the newest checkpoint then; -1 without one.
        code: The exit code of `ps-run`.
        restarts: How often the job was restarted.
        seconds: From the kill to the end.
        equal: Whether it ended in the bytes of an undisturbed job; None if it failed.
    """

    victim: str
    moment: float
    step: int
    code: int
    restarts: int
    seconds: float
    equal: bool | None

    @property
    def ok(self) -> bool:
        return self.code == 0 and bool(self.equal)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.restarts")
    parser.add_argument("--kills", type=int, default=20, help="number of jobs of each kind")
    parser.add_argument("--kind", choices=FLAGS, action="append", help="kind of job [default: all]")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = 0
    take_in_orphans()
    with ForkServer() as fork_server:
        for kind in arguments.kind or FLAGS:
            with TemporaryDirectory(prefix="hubring-restarts-") as folder:
                cluster = Cluster(Path(folder), fork_server)
                results = play(cluster, Path(folder), kind, arguments.kills, arguments.seed)
            failed += sum(not result.ok for result in results)
            print(summary(kind, results), flush=True)
    raise SystemExit(failed > 0)


def play(cluster: Cluster, folder: Path, kind: str, kills: int, seed: int) -> list[Result]:
    """Runs one job undisturbed, then others until so many lost a process."""
    began = time.monotonic()
    whole = Job(cluster, folder / "whole", kind, *PACE)
    parameters, span = whole.parameters(), time.monotonic() - began
    results: list[Result] = []
    number = 0
    while len(results) < kills:
        number += 1
        chosen = random.Random(f"{kind} {seed} {number}")
        victim, moment = chosen.choice(VICTIMS[kind]), chosen.uniform(0, span)
        job = Job(cluster, folder / str(number), kind, *PACE)
        began = time.monotonic()
        time.sleep(moment)
        while not (pid := job.kill(victim, chosen.randrange(2))) and job.program.process.poll() is None:
            time.sleep(0.01)
        killed, step = time.monotonic(), job.step
        if not pid:  # the job had ended; a kill that hit nothing does not count
            job.parameters()
            continue
        code = job.program.wait(300)
        seconds, restarts = time.monotonic() - killed, len(job.restarts)
        equal = same(parameters, job.parameters()) if code == 0 else None
        results.append(Result(victim, killed - began, step, code, restarts, seconds, equal))
        print(f"{kind} {number:3}  {results[-1]}", flush=True)
        if not results[-1].ok:
            print(job.program.said())
    return results


def summary(kind: str, results: list[Result]) -> str:
    """Returns one line about all kills of a kind of job."""
    seconds = sorted(result.seconds for result in results)
    by_restarts = {count: sum(one.restarts == count for one in results) for count in range(4)}
    return (
        f"{kind}: {sum(result.ok for result in results)} of {len(results)} ended with 0 and the same bytes;"
        f" jobs by restarts {by_restarts}; {seconds[len(seconds) // 2]:.1f} s from the kill to the end at the"
        f" median, {seconds[-1]:.1f} s at most"
    )


if __name__ == "__main__":
    main()
