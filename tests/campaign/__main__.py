"""Plays seeded faults: python -m tests.campaign --runs 500 --seed 1.

With `--kills` each run kills a process of a server that has standbys, or two of different kinds. With
`--starts` a worker ends before the first step.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from tests.campaign.runs import play
from tests.campaign.scenario import drawn, drawn_kill, drawn_start
from tests.campaign.table import Result, report

KEPT = Path("build/campaign")
WITHIN = "HUBRING_CAMPAIGN_MOUNTS"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--runs", type=int, default=100, help="number of runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    parser.add_argument("--seeds", type=int, nargs="*", help="play these seeds instead")
    parser.add_argument("--lanes", type=int, default=1, help="runs side by side")
    parser.add_argument("--kills", action="store_true", help="kill a process of a server with standbys")
    parser.add_argument("--starts", action="store_true", help="end a worker before the first step")
    arguments = parser.parse_args()
    if WITHIN not in os.environ:
        within_own_mounts()
    seeds = arguments.seeds or range(arguments.seed, arguments.seed + arguments.runs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    draw = drawn_kill if arguments.kills else drawn_start if arguments.starts else drawn
    scenarios = [draw(seed) for seed in seeds]
    results = play(scenarios, arguments.lanes, KEPT, tell)
    text = report(results, time.monotonic() - began)
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "report.md").write_text(text + "\n")
    print(f"\n{text}")
    without = sorted(set(seeds) - {result.scenario.seed for result in results})
    if without:
        print(f"\n{len(without)} of {len(seeds)} seeds have no result: {without}")
    raise SystemExit(bool(without) or any(result.violations for result in results))


def within_own_mounts() -> None:
    """Starts this program again where it may mount a small disk, which ends with it."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *as_root, "--mount", sys.executable, "-m", "tests.campaign", *sys.argv[1:]]
    os.execvpe("unshare", command, {**os.environ, WITHIN: "1"})


def tell(result: Result) -> None:
    verdict = f"VIOLATES {', '.join(result.violations)}" if result.violations else "ok"
    print(f"seed {result.scenario.seed:6}  {result.seconds:5.1f} s  {result.scenario}: {verdict}")
    for name, found in result.violations.items():
        print(*(f"    {name}: {each}" for each in found), sep="\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
