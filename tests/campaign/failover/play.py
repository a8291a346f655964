"""Plays runs, and judges what they leave."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from tests.campaign import states
from tests.campaign.evidence import State
from tests.campaign.failover.plan import Plan
from tests.campaign.failover.run import Run
from tests.campaign.ledger import applied_wrongly, counted_wrongly, foreign, missing
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.process_tree import below, command

KEPT = Path("build/failover")


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


class Failovers:
    """Plays runs, and each undisturbed job once.

    Args:
        fork_server: Starts the programs.
        kept: Where the folders of runs stay if something is wrong.
    """

    def __init__(self, fork_server: ForkServer, kept: Path = KEPT) -> None:
        self._fork_server = fork_server
        self._kept = kept
        self._references: dict[tuple[str, int, bool], State] = {}

    def play(self, plan: Plan) -> Played:
        played, reference = Played(plan), self._reference(plan) if plan.synchronous else None
        folder, cluster = self._begin(f"seed-{plan.seed}")
        try:
            run = Run(cluster, plan)
            run.until_the_moment()
            try:
                played.took = run.kill()
            except ProcessLookupError:
                played.late = True
            played.faults = run.finish("" if played.late else plan.target)
            found = int(run.result().get("failovers", 0))
            # A job whose workers still train needs what was killed.
            if found > plan.failovers or (plan.moment == "training" and found < plan.failovers):
                played.faults.append(f"the server reports {found} failovers, expected {plan.failovers}")
            played.late |= found < plan.failovers
            if not played.faults:
                played.faults = judged(run.parameters(), plan, reference)
            played.pause = states.longest_step(folder, plan.names)
        except (AssertionError, OSError, IndexError, ValueError) as error:
            played.faults.append(f"{type(error).__name__}: {error}")
        finally:
            end(cluster, keep=bool(played.faults))
        return played

    def _reference(self, plan: Plan) -> State:
        """Returns the parameters of a job without a kill."""
        key = plan.kind, plan.workers, plan.twice
        if key not in self._references:
            calm = Plan(0, plan.kind, plan.wire, plan.workers, twice=plan.twice)
            _, cluster = self._begin("reference")
            try:
                run = Run(cluster, calm)
                assert run.finish("") == []
                self._references[key] = run.parameters()["rank-0"]
            finally:
                end(cluster, keep=False)
        return self._references[key]

    def _begin(self, name: str) -> tuple[Path, Cluster]:
        folder = (self._kept / name).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder, Cluster(folder, self._fork_server)


def end(cluster: Cluster, *, keep: bool) -> None:
    """Ends all processes of a run; removes its folder unless it is kept."""
    cluster.kill()
    for pid in below(os.getpid()):
        if "hubring.ps.s" in command(pid):
            os.kill(pid, signal.SIGKILL)
    if not keep:
        shutil.rmtree(cluster.folder)


def judged(parameters: dict[str, State], plan: Plan, reference: State | None) -> list[str]:
    """Returns what is wrong with the parameters of each worker and of the last checkpoint."""
    wrong = [f"{name} left no parameters" for name in plan.names if name not in parameters]
    for holder, final in parameters.items():
        if not final:
            found = ["there is none"]
        elif reference is not None:
            found = [f"{name} differs" for name in reference if not same(final[name], reference[name])]
        elif plan.kind == "backup":
            found = counted_wrongly(final["ledger"], plan.steps, -1) + foreign(final["ledger"], plan.steps)
        else:
            found = applied_wrongly(final["ledger"], plan.steps, False) + foreign(final["ledger"], plan.steps)
            if holder == "the last checkpoint":  # a worker may end before the others push
                found += missing(final["ledger"], product(range(plan.steps), range(plan.workers)))
        wrong += [f"{holder}: {each}" for each in found]
    return wrong


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
