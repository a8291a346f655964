"""Runs one training: starts the server and the workers, waits, and writes the outcome.

Law: a worker's record shows how many steps it has completed. When it reaches the fault's step, the victim
gets SIGKILL. The worker can complete more steps between its report and the signal, so `ProcessLoss.step`
holds the last reported step rather than the fault's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from hubring.ps.core.errors import HubringError
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.plan.setting import Fault
from hubring.workers.compare.run import timeline
from hubring.workers.compare.run.conductor import Conductor
from hubring.workers.compare.run.outcome import Line, RunOutcome, digest, divergence, latest
from hubring.workers.compare.run.programs import Programs
from hubring.workers.compare.run.site import ThisMachine
from hubring.workers.launchers.known_launchers import meeting_variables
from hubring.workers.peers.processes import (
    Lifeline,
    ProcessFailed,
    RunProcess,
    RunProcesses,
    await_address,
    clean_environment,
)

LOOK_SECONDS = 0.002
"""Interval of reading the record: a step of the smallest job."""


class ProcessLoss:
    """Watches a worker's record during the `with` block and kills the victim at its step.

    Args:
        fault: When to kill it.
        record: The file that the worker writes.
        find: Returns the victim's process, once training has begun. It may take longer than many steps.

    Attributes:
        step: Last reported step when it was killed; None: it ended before its step, so nothing was lost.
    """

    def __init__(self, fault: Fault, record: Path, find: Callable[[], int | None]) -> None:
        self.step: int | None = None
        self._fault = fault
        self._record = record
        self._find = find
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loss", daemon=True)

    def __enter__(self) -> ProcessLoss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._record.exists():
            if self._over.wait(LOOK_SECONDS):
                return
        with self._record.open() as lines:
            begun, victim = "", None
            while not self._over.wait(LOOK_SECONDS):
                *whole, begun = (begun + lines.read()).split("\n")
                if not whole:
                    continue
                victim = victim or self._find()
                if victim is not None and (step := json.loads(whole[-1])["step"]) >= self._fault.step:
                    with contextlib.suppress(ProcessLookupError):  # it has ended, so nothing was lost
                        os.kill(victim, signal.SIGKILL)
                        self.step = step
                    return


def outlived(
    codes: Sequence[int], results: Sequence[Mapping[str, Any] | None], lost: int | None
) -> str | None:
    """Returns what a run lost besides the killed process.

    Args:
        codes: Every worker's exit code, by rank; negative for a signal.
        results: Every worker's last line, by rank; None where it printed none.
        lost: Rank of the killed worker; None if another process was killed.

    Returns:
        None if all other workers finished; else what failed, for a table.
    """
    failed = [rank for rank, code in enumerate(codes) if code and rank != lost]
    if not failed:
        return None
    ended = [results[rank] or {} for rank in failed]
    if any(each.get("topology") == "ring" for each in ended):
        return "the ring broke"
    return f"also failed: {', '.join(f'worker {rank}' for rank in failed)}"


Progress = Callable[[Line], None]
"""Receives rank 0's latest report, a few times a second."""

Results = list[Mapping[str, Any] | None]
"""Last lines of the workers, by rank."""


class Runner(Struct, frozen=True):
    """Runs trainings, all rows in the same way.

    Attributes:
        experiment: The experiment.
        lifeline: Ends the processes of a run if this process is killed.
        site: Where they run.
    """

    experiment: Experiment
    lifeline: Lifeline | None = None
    site: ThisMachine | Conductor = ThisMachine()

    def busy(self) -> list[str]:
        """Returns the site's machines that are not idle now, measured for a second.

        The load average does not tell: it still counts what has ended, such as an installation.
        """
        heard = self.site.listen()
        time.sleep(1.0)
        return [each.machine or "this machine" for each in heard() if each.disturbance()]

    def run(self, run: PlannedRun, folder: Path, progress: Progress) -> RunOutcome:
        """Trains once in a new folder; writes `outcome.json` last.

        A training that diverges also has an outcome.

        Raises:
            ProcessFailed: A process failed; the message shows the end of its log.
            DeadlineExceeded: The run took longer than the timeout.
            UsageError: The setting's hosts are not available here.
            HubringError: The folder cannot be emptied.
        """
        _empty(folder)
        heard, began, watch = self.site.listen(), datetime.now(UTC), time.monotonic()
        script = digest(self.experiment.script)
        broken: HubringError | None = None
        with self.site.hosts(run.setting) as machines, meeting_variables({}) as meeting:
            port = int(meeting["MASTER_PORT"])
            programs = Programs(self.experiment, run, folder.absolute(), machines, port)
            programs.write_hardship()
            threads = self.experiment.threads or self.site.threads(run.setting.workers)
            own, timeout = clean_environment(threads), self.experiment.timeout
            started = RunProcesses(folder, own, timeout, self.lifeline, self.site.starter(threads))
            with started as processes:
                server, team = _start(programs, processes)
                try:
                    _await_end(programs, processes, server, team, progress)
                except HubringError as error:  # the last lines show whether training diverged
                    broken = error
            victim = run.setting.fault.worker if run.setting.fault else None
            results, last = _last_lines(programs, server, team, victim, partly=broken is not None)
        diverged = divergence(results, last)
        if broken is not None and diverged is None:
            raise broken
        codes = [each.code or 0 for each in team]
        lost = None if run.setting.fault is None else outlived(codes, results, victim)
        merged = timeline.merge(programs.traces, folder / "trace.json", self.site.clocks())
        shutil.rmtree(programs.traces, ignore_errors=True)  # a peer can have none
        outcome = RunOutcome(
            run=run,
            folder=folder,
            commands=[shlex.join(process.command) for process in processes.started],
            began=began.isoformat(),
            seconds=time.monotonic() - watch,
            noise=heard(),
            results=results,
            server=last,
            failed=diverged or lost,
            clocks=merged.clocks,
            script=script,
        )
        outcome.write()
        return outcome


def _empty(folder: Path) -> None:
    """Deletes what an interrupted run left.

    Raises:
        HubringError: Programs of that run, on a machine that is slow to end them, still write there.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as cause:
        raise HubringError(
            f"{folder} cannot be emptied ({cause}). If programs of an earlier run still write there, wait"
            " until they have ended, then start again with the same --out"
        ) from cause


def _last_lines(
    programs: Programs, server: RunProcess | None, team: list[RunProcess], victim: int | None, *, partly: bool
) -> tuple[Results, Mapping[str, Any] | None]:
    """Returns the workers' last lines by rank, None for the killed worker, and that of our server."""
    ranks, fault = range(programs.workers), programs.run.setting.fault
    killed = fault is not None and fault.victim == "coordinator"  # without a standby it is the whole server
    if programs.run.row.peer is not None:
        return [_last_line(partial(programs.peers.result, rank), partly=partly) for rank in ranks], None
    last = None if server is None else _last_line(server.result, partly=partly or killed)
    return [None if rank == victim else _last_line(team[rank].result, partly=partly) for rank in ranks], last


def _last_line(read: Callable[[], Mapping[str, Any]], *, partly: bool) -> Mapping[str, Any]:
    """Returns a program's last line; with `partly`, empty if the program ended before printing it."""
    try:
        return read()
    except (ProcessFailed, OSError, ValueError):
        if not partly:
            raise
        return {}


def _start(programs: Programs, processes: RunProcesses) -> tuple[RunProcess | None, list[RunProcess]]:
    """Starts the server, its shards on other hosts, and the workers."""
    if programs.run.row.peer is not None:
        return _start_peer(programs, processes)
    server = address = None
    if programs.run.row.server is not None:
        server = processes.start("server", programs.server())
        address = await_address(processes, programs.address_file)
        for number in range(1, programs.apart + 1):
            processes.start(f"shard {number}", programs.shard(number, address))
        wanted = programs.run.setting.servers if programs.apart else 0
        # A job starts with the shards that joined before it.
        while wanted and len(_status(programs, address).get("shards", ())) < wanted:
            processes.pause(f"all {wanted} shards")
    ranks = range(programs.workers)
    return server, [processes.start(f"worker {rank}", programs.worker(rank, address)) for rank in ranks]


def _start_peer(programs: Programs, processes: RunProcesses) -> tuple[RunProcess | None, list[RunProcess]]:
    """Starts a peer's servers, if any, and its workers: one process each, or one for all."""
    peers = programs.peers
    servers = [processes.start(*each) for each in peers.server_programs()]
    if peers.row.leads:
        await_address(processes, peers.meet)
    team = [processes.start(*each) for each in peers.worker_programs(programs.peer_words)]
    return servers[0] if servers else None, team


def _status(programs: Programs, address: str) -> dict[str, Any]:
    answer = subprocess.run(programs.status(address), capture_output=True, text=True, check=False)
    try:
        status: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    except (IndexError, ValueError) as cause:
        raise HubringError(f"the server at {address} does not report its status: {answer.stderr}") from cause
    return status


def _await_end(
    programs: Programs,
    processes: RunProcesses,
    server: RunProcess | None,
    team: list[RunProcess],
    progress: Progress,
) -> None:
    """Waits until all have ended; kills the process of the setting's fault."""
    fault = programs.run.setting.fault
    if fault is None:
        _watch(programs, processes, progress)
        return
    for process in processes.started:
        process.expendable = True  # their failures are part of the result
    watched = 0 if fault.worker is None else fault.worker
    with ProcessLoss(fault, programs.record(watched), lambda: _pid(programs, fault, team)) as loss:
        _watch(programs, processes, progress)
    if loss.step is None:
        raise HubringError(
            f"{programs.run.label}: {fault.words} ended before it could be killed at step {fault.step};"
            f" set an earlier step. {(server or team[watched]).tail()}"
        )


def _pid(programs: Programs, fault: Fault, team: list[RunProcess]) -> int | None:
    """Returns the process to kill, on this machine; None if the job is over."""
    if fault.worker is not None:
        pid = team[fault.worker].pid
        assert pid is not None, "a fault on another machine"
        return pid
    status = _status(programs, programs.address_file.read_text().strip())
    if "error" in status:
        return None
    if fault.victim == "coordinator":
        return int(status["pid"])
    shard = next(each for each in status["shards"] if each["shard"] == fault.rank)
    return int(shard["pid"] if fault.victim == "shard" else shard["standby"]["pid"])


def _watch(programs: Programs, processes: RunProcesses, progress: Progress) -> None:
    while running := processes.running():
        processes.pause(f"{', '.join(process.name for process in running)} to end")
        if (line := latest(programs.record(0))) is not None:
            progress(line)
