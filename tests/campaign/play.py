"""Plays one scenario with real processes, and collects the evidence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tests.campaign.evidence import Act, Ended, Evidence, State
from tests.campaign.faults import SIGNAL, Fault
from tests.campaign.job import LIMIT, Job, send
from tests.campaign.resources import Held, held
from tests.campaign.scenario import IN_INIT, LAST_HOLD, Scenario
from tests.campaign.states import checkpoint, checkpoints, finals, trails
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import ForkServer
from tests.support.processes.process_tree import children, command, descendants, ends_by
from tests.support.processes.stopwatch import Stopwatch

SMALL_DISK = "2m"
LEAVE_SECONDS = 10.0
"""Seconds in which the shards of a server that was killed must end."""


def play(
    scenario: Scenario, folder: Path, fork_server: ForkServer, reference: State | None = None
) -> Evidence:
    """Plays a scenario; no process outlives it.

    Args:
        scenario: What happens.
        folder: For the output of all programs.
        fork_server: Starts them.
        reference: The parameters of the undisturbed run.
    """
    before = descendants()
    cluster = Cluster(folder, fork_server)
    with contextlib.ExitStack() as stack:
        stack.callback(_end, cluster, before)
        saved = folder / "saved"
        saved.mkdir()
        if scenario.fault == "full disk":
            stack.enter_context(_small_disk(saved))
        play_it = _play_start if scenario.starts else _play
        return play_it(cluster, scenario, saved, reference, before)


def _play_start(
    cluster: Cluster, scenario: Scenario, saved: Path, reference: State | None, others: set[int]
) -> Evidence:
    """Ends a worker before the first step, and starts another one in its place."""
    watch = Stopwatch()
    job = Job(cluster, scenario, saved, 1, watch)
    job.start(scenario.victim, str(scenario.victim), str(scenario.step))
    victim, rest = scenario.target, [rank for rank in range(scenario.workers) if rank != scenario.victim]
    if scenario.step != IN_INIT:
        for rank in rest:
            job.start(rank)
    job.wait(
        lambda: (job.joined if scenario.step == IN_INIT else partial(job.holds, step=scenario.step))(victim),
        f"step {scenario.step}",
    )
    send(job.workers[victim].process.pid, SIGNAL[scenario.fault])
    job.wait(lambda: job.ended(victim), "end of the victim")
    job.start(scenario.victim, late=True)
    for rank in rest:
        if f"rank-{rank}-1" not in job.workers:
            job.start(rank)
    act = _with_leftovers(_act(job, job.finish()), others)
    return Evidence(scenario, True, 0, (act,), reference, seconds=watch.seconds)


def _play(
    cluster: Cluster, scenario: Scenario, saved: Path, reference: State | None, others: set[int]
) -> Evidence:
    watch = Stopwatch()
    job = Job(cluster, scenario, saved, 1, watch)
    wired = scenario.place in ("data", "control")
    relays = job.relays() if wired else {}
    through = f"127.0.0.1:{relays['control'][0].port}" if wired else ""
    holds = [",".join(map(str, range(scenario.workers))), str(LAST_HOLD)]
    if scenario.holders:
        holds = [",".join(map(str, scenario.holders)), str(scenario.step), *holds]
    for rank in range(scenario.workers):
        job.start(rank, *holds, address=through if rank == scenario.victim else "")
    fault = Fault(scenario, job, relays)
    processes = job.processes()  # found while the job is undisturbed, and before its moment can pass
    _wait_for_moment(job)
    before = _measured(processes)
    fault.happen(processes)
    job.go(scenario.step)
    fault.pass_by()
    _replace(job, holds)
    job.settle()
    for lost in (scenario.target, scenario.also):
        processes.pop(f"standby of {lost}", None)  # has the victim's work now, and what that takes
    after = _measured(processes)
    fault.end()
    job.go(LAST_HOLD)
    left = job.finish()
    fault.damage()
    acts, kept = [_act(job, left)], 0
    if scenario.resumes and any(worker.process.returncode for worker in job.workers.values()):
        kept = len(checkpoints(saved))
        acts.append(_resumed(cluster, scenario, saved, watch, only_damaged=kept == 1 and scenario.damages))
    acts[-1] = _with_leftovers(acts[-1], others)
    facts = (fault.fired, job.forwarded, tuple(acts), reference, fault.paused)
    return Evidence(scenario, *facts, before, after, watch.seconds, kept)


def _resumed(
    cluster: Cluster, scenario: Scenario, saved: Path, watch: Stopwatch, *, only_damaged: bool
) -> Act:
    if only_damaged:
        with contextlib.suppress(AssertionError):  # it ended before it listened, as it must
            Job(cluster, scenario, saved, 2, watch)
        server = cluster.programs[-1]
        error = server.result().get("error", "") if server.out.read_text() else ""
        return Act((Ended(server.name, server.process.returncode, error=error, said=server.said()),))
    job = Job(cluster, scenario, saved, 2, watch)
    for rank in range(scenario.workers):
        job.start(rank)
    return _act(job, job.finish())


def _wait_for_moment(job: Job) -> None:
    """Waits for the scenario's step: the holders hold, and the others are in it where they can be."""
    scenario = job.scenario
    names = list(job.workers)
    first = names[scenario.first_rank]

    def now() -> bool:
        match scenario.moment:
            case "between":
                return job.all_but_stuck(lambda name: job.holds(name, scenario.step))
            case "within":
                others = [name for name in names if name != first] if scenario.synchronous else []
                in_it = all(job.progress(name) >= scenario.step for name in others)
                return job.holds(first, scenario.step) and in_it
        return job.progress(first) >= scenario.step

    job.wait(now, f"step {scenario.step}")


def _replace(job: Job, holds: list[str]) -> None:
    """Starts another worker for the lost one, once it is lost; returns once it has joined.

    A worker that was asked to stop while it holds keeps its rank until all go on: it cannot be replaced.
    """
    scenario = job.scenario
    if not (scenario.loses_a_worker and scenario.replaced):
        return
    victim = f"rank-{scenario.victim}-1"
    others = [program for name, program in job.workers.items() if name != victim]
    words = "the job continues with"
    lost = job.within(
        lambda: job.ended(victim) and any(words in program.said() for program in others),
        10.0 if scenario.fault != "terminate" else 1.0,
    )
    if scenario.fault == "terminate" and not lost and job.holds(victim, LAST_HOLD):
        return
    job.start(scenario.victim, *holds, late=True)
    late = f"{victim}-again"
    job.within(lambda: job.joined(late) or job.ended(late), LIMIT)


def _measured(processes: Mapping[str, int]) -> dict[str, Held]:
    """Returns what each process holds that runs."""
    found = {name: held(pid) for name, pid in processes.items()}
    return {name: each for name, each in found.items() if each is not None}


def _act(job: Job, left: list[str]) -> Act:
    scenario = job.scenario
    names = list(job.workers)
    disturbed = job.act == 1
    on_worker = disturbed and scenario.place in ("worker", "member")
    on_server = disturbed and (scenario.place == "coordinator" or scenario.damages)
    victims = {f"rank-{scenario.victim}-1"} if on_worker else {job.server.name} if on_server else set()
    summary = job.server.result() if job.server.out.read_text() else {}
    programs = []
    for program in (job.server, *job.workers.values()):
        lines = program.out.read_text().splitlines()
        error = program.result().get("error", "") if lines else ""
        code = None if program.name in left else program.process.returncode
        killed = (
            disturbed and scenario.fault == "kill" and job.server.name in (scenario.target, scenario.also)
        )
        if killed and program is job.server:
            code = summary.get("exit_code", code)  # the coordinator prints it in the guardian's place
        victim, late = program.name in victims, program.name in job.late
        programs.append(Ended(program.name, code, victim, error, program.said(), late))
    saved = checkpoint(job.saved) if scenario.at_hub else (None, -1, -1)
    return Act(tuple(programs), trails(job.folder, names), finals(job.folder, names), *saved, summary)


def _with_leftovers(act: Act, others: set[int]) -> Act:
    """Adds processes that outlive the job, as programs that still ran at the end."""
    deadline = time.monotonic() + LEAVE_SECONDS
    left = [pid for pid in descendants() - others if not ends_by(pid, deadline)]
    extra = tuple(Ended(f"process {pid} ({command(pid)[:60]})", None) for pid in left)
    return replace(act, programs=(*act.programs, *extra))


def _end(cluster: Cluster, others: set[int]) -> None:
    with (cluster.folder / "log").open("w") as log, contextlib.redirect_stdout(log):
        cluster.end()
    for pid in descendants() - others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        ends_by(pid, time.monotonic() + LEAVE_SECONDS)
    for pid in children(os.getpid()):  # adopted orphans
        if pid not in others:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mounts a small disk on a folder; the campaign runs in a mount namespace of its own."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "small", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
