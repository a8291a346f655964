"""Kills a server's processes at seeded moments: python -m tests.campaign.takeover --kills 50 --seed 1.

Each run is one job with `--standby 1`, in which one process gets SIGKILL: the coordinator, a shard, a standby
of either, or the guardian that a person started. The job must end as if nothing had happened, with the same
exit codes and last line. Parameters and the last checkpoint are those of an undisturbed job (synchronous), or
have each push once (asynchronous). A kill after which the job ends without a takeover came too late, and does
not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from safetensors.torch import load_file

from tests.campaign import states
from tests.campaign.job import CONSTANTS, SCRIPT
from tests.campaign.ledger import applied_wrongly, counted_wrongly, foreign, missing
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.orphans import take_in_orphans
from tests.support.processes.process_tree import below, command, coordinators, parent

KEPT = Path("build/takeover")
STEPS = 60
PACE = 0.02
WORKERS = 2
KINDS = ("bsp", "bsp", "asp", "ssp", "backup", "ring", "ring")
MOMENTS = ("joining", "training", "training", "ending")
OF_A_RING = ("coordinator", "coordinator", "coordinator", "guardian", "standby")
OF_A_HUB = ("shard", "shard", "shard", "shard", "standby of a shard", *OF_A_RING[1:])
SHARDS = 2


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    seed: int
    kind: str
    wire: str
    target: str
    moment: str
    delay: float
    """Part of the moment's length after which the process is killed."""
    shard: int
    """The victim, if it is a shard or its standby."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        kind = chance.choice(KINDS)
        wire = "gloo" if kind == "ring" else chance.choice(("shm", "zmq", "grpc"))
        target = chance.choice(OF_A_RING if kind == "ring" else OF_A_HUB)
        moment, delay = chance.choice(MOMENTS), chance.random()
        return cls(seed, kind, wire, target, moment, delay, chance.randrange(SHARDS))

    @property
    def synchronous(self) -> bool:
        return self.kind in ("bsp", "ring")

    def __str__(self) -> str:
        return f"{self.kind:6} {self.wire:4}  {self.target:18} while {self.moment:8} +{self.delay:.2f}"


@dataclass
class Played:
    """One run's outcome."""

    plan: Plan
    faults: list[str] = field(default_factory=list)
    pause: float = 0.0
    """Seconds of the longest step of any worker."""
    took: float = 0.0
    """Seconds from the kill until a coordinator answers; 0 if none was killed."""
    late: bool = False
    """Whether the job was over before a standby could replace the process."""


class Run:
    """One job and one kill.

    Args:
        cluster: Starts the programs.
        kind: The mode, or `ring`.
        wire: The transport.
    """

    def __init__(self, cluster: Cluster, kind: str, wire: str) -> None:
        self._cluster, self.kind = cluster, kind
        flags = ["--workers", str(WORKERS), "--once", "--no-page", "--standby", "1"]
        if kind != "ring":
            flags += ["--mode", kind, *CONSTANTS.get(kind, ()), "--shards", str(SHARDS)]
            flags += ["--slice-bytes", "4096"]
            flags += ["--checkpoint-dir", str(cluster.folder / "saved"), "--checkpoint-every", "0.3"]
        self.server, self.address = cluster.server(*flags)
        self.failovers: Any = 0
        self._victims: dict[str, int] = {"guardian": self.server.process.pid}
        self.server.until(lambda: self._guarded(0 if kind == "ring" else SHARDS), "standbys")
        topology = ["--topology", "ring"] if kind == "ring" else ["--transport", wire]
        self.workers = [
            cluster.worker(
                self.address,
                *(*topology, "--rank", str(rank), "--timeout", "30", SCRIPT, str(cluster.folder)),
                *(f"rank-{rank}", str(WORKERS), str(STEPS), str(PACE), ""),
                name=f"rank-{rank}",
            )
            for rank in range(WORKERS)
        ]

    def _guarded(self, shards: int) -> bool:
        """Whether the coordinator and each shard have a standby; notes the processes to kill."""
        pair = coordinators()
        if len(pair) != 2:
            return False
        self._victims |= zip(("coordinator", "standby"), pair, strict=True)
        rows = self._cluster.status(self.address)["shards"] if shards else []
        for row in rows:
            self._victims[f"shard {row['shard']}"] = row["pid"]
            if row["standby"] is not None:
                self._victims[f"standby of a shard {row['shard']}"] = row["standby"]["pid"]
        return len(self._victims) == 3 + 2 * shards

    def until(self, plan: Plan) -> None:
        """Waits until the moment to kill."""
        if plan.moment == "joining":
            time.sleep(3.0 * plan.delay)
            return
        step = int(plan.delay * (STEPS - 10)) if plan.moment == "training" else STEPS
        self.workers[0].until(
            lambda: (
                states.progress(self._cluster.folder, "rank-0") >= step
                or self.workers[0].process.poll() is not None
            ),
            f"step {step}",
        )
        if plan.moment == "ending":
            time.sleep(0.3 * plan.delay)

    def kill(self, plan: Plan) -> float:
        """Kills; returns the seconds until a coordinator answers.

        Raises:
            ProcessLookupError: The process has ended.
        """
        numbered = f"{plan.target} {plan.shard}" if "shard" in plan.target else plan.target
        if not parent(self._victims[numbered]):
            raise ProcessLookupError(f"the {numbered} has ended")
        os.kill(self._victims[numbered], signal.SIGKILL)
        began = time.monotonic()
        if plan.target != "coordinator":
            return 0.0
        while self.server.process.poll() is None:
            try:
                if self._cluster.status(self.address)["failovers"]:
                    break
            except Exception:
                time.sleep(0.01)
        return time.monotonic() - began

    def finish(self, killed: str) -> list[str]:
        """Waits for the end; returns what is wrong with exit codes and the last line."""
        faults = [
            f"{worker.name} exited with {code}: {worker.said()[-600:]}"
            for worker in self.workers
            if (code := worker.wait()) != 0
        ]
        code = self.server.wait()
        if code != (-signal.SIGKILL if killed == "guardian" else 0):
            faults.append(f"the server exited with {code}: {self.server.said()[-900:]}")
        deadline = time.monotonic() + 60.0
        while coordinators() and time.monotonic() < deadline:
            time.sleep(0.05)
        if left := coordinators():
            faults.append(f"{left} still run")
        lines = self.server.out.read_text().splitlines()
        result = json.loads(lines[-1]) if lines else {"finished": [], "error": "no last line"}
        if (result["finished"], result["error"]) != ([0, 1], ""):
            faults.append(f"the last line is {result}")
        self.failovers = result.get("failovers", 0)
        return faults

    def parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns what each worker ended with, and what the last checkpoint of a hub has."""
        folder = self._cluster.folder
        found = {f"rank {rank}": load_file(folder / f"rank-{rank}.safetensors") for rank in range(WORKERS)}
        if self.kind != "ring":
            saved, *_ = states.checkpoint(folder / "saved")
            found["the last checkpoint"] = dict(saved or {})
        return found


def judged(run: Run, plan: Plan, reference: dict[str, torch.Tensor] | None) -> list[str]:
    """Returns what is wrong with the parameters."""
    wrong = []
    for holder, final in run.parameters().items():
        if not final:
            found = ["there is none"]
        elif reference is not None:
            found = [f"{name} differs" for name in reference if not torch.equal(final[name], reference[name])]
        elif plan.kind == "backup":
            found = counted_wrongly(final["ledger"], STEPS, -1) + foreign(final["ledger"], STEPS)
        else:
            found = applied_wrongly(final["ledger"], STEPS, False) + foreign(final["ledger"], STEPS)
            if holder == "the last checkpoint":  # a worker may end before the others push
                found += missing(final["ledger"], product(range(STEPS), range(WORKERS)))
        wrong += [f"{holder}: {each}" for each in found]
    return wrong


def play(plan: Plan, fork_server: ForkServer, references: dict[str, dict[str, torch.Tensor]]) -> Played:
    """Plays one run; keeps its folder if something is wrong."""
    folder = KEPT / f"seed-{plan.seed}"
    reference = None
    if plan.synchronous:
        if plan.kind not in references:
            references[plan.kind] = undisturbed(plan, fork_server)
        reference = references[plan.kind]
    played, cluster = Played(plan), begin(folder, fork_server)
    try:
        run = Run(cluster, plan.kind, plan.wire)
        run.until(plan)
        try:
            played.took = run.kill(plan)
        except ProcessLookupError:
            played.late = True
        played.faults = run.finish("" if played.late else plan.target)
        played.late |= plan.target in ("coordinator", "shard") and not run.failovers
        if not played.faults:
            played.faults = judged(run, plan, reference)
        played.pause = states.longest_step(folder, [f"rank-{rank}" for rank in range(WORKERS)])
    except (AssertionError, OSError, IndexError, ValueError) as error:
        played.faults.append(f"{type(error).__name__}: {error}")
    finally:
        end(cluster, folder, keep=bool(played.faults))
    return played


def undisturbed(plan: Plan, fork_server: ForkServer) -> dict[str, torch.Tensor]:
    """Returns the parameters of a job without a kill."""
    folder = KEPT / f"reference-{plan.kind}"
    cluster = begin(folder, fork_server)
    try:
        run = Run(cluster, plan.kind, plan.wire)
        assert run.finish("") == []
        return {name: tensor.clone() for name, tensor in run.parameters()["rank 0"].items()}
    finally:
        end(cluster, folder, keep=False)


def begin(folder: Path, fork_server: ForkServer) -> Cluster:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return Cluster(folder.absolute(), fork_server)


def end(cluster: Cluster, folder: Path, *, keep: bool) -> None:
    cluster.kill()
    for pid in below(os.getpid()):
        if "hubring.ps.s" in command(pid):
            os.kill(pid, signal.SIGKILL)
    if not keep:
        shutil.rmtree(folder)


def spread(values: list[float]) -> str:
    """Returns median, 95th percentile and longest of some seconds."""
    if len(values) < 2:
        return "| - | - | - |"
    late = quantiles(values, n=20, method="inclusive")[-1]
    return f"| {median(values):.2f} | {late:.2f} | {max(values):.2f} |"


def table(results: list[Played]) -> str:
    """Returns the report in Markdown."""
    lines = ["| killed | runs | wrong | seconds | median | 95 % | longest |", "|---|---|---|---|---|---|---|"]
    for target in dict.fromkeys(OF_A_HUB):
        found = [each for each in results if each.plan.target == target and not each.late]
        head = f"| {target} | {len(found)} | {sum(bool(each.faults) for each in found)} |"
        lines.append(f"{head} longest step {spread([each.pause for each in found])}")
        if target == "coordinator":
            lines.append(f"{head} until it answers {spread([each.took for each in found])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.takeover")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first kill")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    take_in_orphans()
    references: dict[str, dict[str, torch.Tensor]] = {}
    results: list[Played] = []
    with ForkServer() as fork_server:
        for seed in count(arguments.seed):
            if sum(not played.late for played in results) == arguments.kills:
                break
            began = time.monotonic()
            played = play(Plan.of(seed), fork_server, references)
            results.append(played)
            print(f"seed {seed:4}  {time.monotonic() - began:5.1f} s  {played.plan}", end="  ")
            print(f"step {played.pause:.2f} s, answers after {played.took:.2f} s", end="  ")
            verdict = "WRONG" if played.faults else "too late" if played.late else "ok"
            print(verdict, *played.faults, sep="\n    ", flush=True)
    print(f"\n{table(results)}")
    sys.exit(any(played.faults for played in results))


if __name__ == "__main__":
    main()
