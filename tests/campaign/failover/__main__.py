"""Kills a server's processes at seeded moments: python -m tests.campaign.failover --kills 100 --seed 1.

Each run is one job with `--standby 1`, in which one process gets SIGKILL: the coordinator, a shard, a standby
of either, or the guardian that a person started. The job must end as if nothing had happened, with the same
exit codes and last line. Parameters and the last checkpoint are those of an undisturbed job without standbys
(synchronous), or have each push once (asynchronous). A kill after which the job ends before a standby is
needed came too late, and does not count. Modes and wires take turns.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from itertools import count

from tests.campaign.failover.plan import Plan
from tests.campaign.failover.play import Failovers, Played
from tests.campaign.failover.table import report
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.orphans import take_in_orphans


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.failover")
    parser.add_argument("--kills", type=int, default=15, help="number of kills that count")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first kill")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    take_in_orphans()
    results: list[Played] = []
    with ForkServer() as fork_server:
        failovers = Failovers(fork_server)
        for seed in count(arguments.seed):
            if sum(not played.late for played in results) >= arguments.kills:
                break
            began = time.monotonic()
            played = failovers.play(Plan.of(seed))
            results.append(played)
            verdict = "WRONG" if played.faults else "too late" if played.late else "ok"
            print(f"seed {seed:4}  {time.monotonic() - began:5.1f} s  {played.plan}", end=": ")
            print(f"step {played.pause:.2f} s, answers after {played.took:.2f} s, {verdict}", end="")
            print("", *played.faults, sep="\n    ", flush=True)
    print(f"\n{report(results)}")
    sys.exit(any(played.faults for played in results))


if __name__ == "__main__":
    main()
