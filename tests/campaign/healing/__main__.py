"""Kills members of one ring again and again: python -m tests.campaign.healing --kills 100.

Each kill hits a random member at a random moment, and a new worker takes its place. At the end the ledger of
samples must show each sample of each epoch once, and all members must have the same parameters.

The first half of the kills hits any member. The second half spares the newest one. It lives through all their
generations, and must hold no more at the end than at the begin, however many there are.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.campaign.healing.run import FEWEST, Run, report, violations
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.orphans import take_in_orphans


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.healing")
    parser.add_argument("--kills", type=int, default=100, help="members to kill")
    parser.add_argument("--seed", type=int, default=1, help="chooses victims and moments")
    arguments = parser.parse_args()
    if arguments.kills < FEWEST:
        parser.error(f"--kills {arguments.kills}: pass {FEWEST} or more")
    take_in_orphans()
    os.environ["MALLOC_ARENA_MAX"] = "1"  # what freed memory leaves in the arenas of ended threads is no leak
    with tempfile.TemporaryDirectory() as folder, ForkServer() as fork_server:
        cluster = Cluster(Path(folder), fork_server)
        try:
            run = Run(cluster, arguments.kills, random.Random(arguments.seed))
            server, members = run.play()
            results = [member.done() for member in members]
            server.done()
            digests = Counter(result["metrics"]["digest"] for result in results)
            found = violations(Path(folder), int(results[0]["metrics"]["epochs"]))
            found += run.leaks()
            if len(digests) > 1:
                found.append(f"the members have different parameters: {dict(digests)}")
            print(report(run), *found, sep="\n")
        except BaseException:
            cluster.end()
            raise
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
