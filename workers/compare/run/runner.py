"""Runs one training: a server where it needs one, its workers, and what they left."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import HubringError
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.hardship.loss import Loss, outlived
from hubring.workers.compare.run import timeline
from hubring.workers.compare.run.child_reaper_start import Lifeline
from hubring.workers.compare.run.outcome import Line, Outcome, divergence, latest
from hubring.workers.compare.run.process import Processes, ProcessFailed, RunProcess
from hubring.workers.compare.run.programs import Programs
from hubring.workers.compare.run.site import Site, ThisMachine

_OF_LAUNCHERS = (
    "PS_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_LOCAL",
    "TORCHELASTIC_",
    "HOROVOD_",
    "HUBRING_LAUNCHER",
)
_OF_TORCHRUN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
}
_OF_PODS = {"JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"}

Progress = Callable[[Line], None]
"""Told rank 0's latest report, a few times a second."""

Results = list[Mapping[str, Any] | None]
"""The workers' last lines, by rank."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Starts every row in the same way.

    Attributes:
        experiment: What all runs have in common.
        lifeline: Ends their processes if this one is killed.
        site: Where they run.
    """

    experiment: Experiment
    lifeline: Lifeline | None = None
    site: Site = ThisMachine()  # noqa: RUF009 - it holds nothing

    def busy(self) -> list[str]:
        """The site's machines that are not at rest before the first run."""
        return self.site.busy()

    def run(self, run: Run, folder: Path, progress: Progress) -> Outcome:
        """Trains once, in a folder that is made anew; `outcome.json` is written last.

        That training diverges is an outcome as well.

        Raises:
            ProcessFailed: A process failed; shows the end of its log.
            DeadlineExceeded: The run took longer than the timeout.
            UsageError: The hosts cannot be had here.
            HubringError: The folder cannot be emptied.
        """
        _make_anew(folder)
        heard, began, watch = self.site.listen(), datetime.now(UTC), time.monotonic()
        broken: HubringError | None = None
        with self.site.hosts(run.setting) as machines:
            programs = Programs(self.experiment, run, folder.absolute(), machines)
            programs.write_hardship()
            with self._processes(run, folder) as processes:
                server, team = _start(programs, processes)
                try:
                    _await_end(programs, processes, team, progress)
                except HubringError as error:  # why is known once all have ended
                    broken = error
            victim = run.setting.fault.rank if run.setting.fault else None
            results, told = _last_lines(programs, server, team, victim, partly=broken is not None)
        diverged = divergence(results, told)
        if broken is not None and diverged is None:
            raise broken
        lost = None if victim is None else outlived([each.code or 0 for each in team], results, victim)
        timeline.merge(programs.traces, folder / "trace.json")
        shutil.rmtree(programs.traces, ignore_errors=True)  # of a peer there may be none
        outcome = Outcome(
            run=run,
            folder=folder,
            commands=[shlex.join(process.command) for process in processes.started],
            began=began.isoformat(),
            seconds=time.monotonic() - watch,
            noise=heard(),
            results=results,
            server=told,
            failed=diverged or lost,
        )
        outcome.write()
        return outcome

    def _processes(self, run: Run, folder: Path) -> Processes:
        threads = self.experiment.threads or self.site.threads(run.setting.workers)
        own, timeout = clean_environment(threads), self.experiment.timeout
        return Processes(folder, own, timeout, self.lifeline, self.site.starter(threads))


def _make_anew(folder: Path) -> None:
    """Deletes what a run left that was stopped half-way.

    Raises:
        HubringError: It cannot be: programs of that run, on a machine that is slow to end them, still write.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as cause:
        raise HubringError(
            f"{folder} cannot be emptied ({cause}): if programs of an earlier run still write there, wait"
            " until they have ended, and start again with the same --out"
        ) from cause


def _last_lines(
    programs: Programs, server: RunProcess | None, team: list[RunProcess], victim: int | None, *, partly: bool
) -> tuple[Results, Mapping[str, Any] | None]:
    """The workers' by rank, None of the one that was killed, and that of a server of ours."""
    ranks = range(programs.workers)
    if programs.run.row.peer is not None:
        return [_last_line(partial(programs.peers.result, rank), partly=partly) for rank in ranks], None
    told = None if server is None else _last_line(server.result, partly=partly)
    return [None if rank == victim else _last_line(team[rank].result, partly=partly) for rank in ranks], told


def _last_line(read: Callable[[], Mapping[str, Any]], *, partly: bool) -> Mapping[str, Any]:
    """What a program said last; `partly`: it may have been ended before, and then that is empty."""
    try:
        return read()
    except (ProcessFailed, OSError, ValueError):
        if not partly:
            raise
        return {}


def _start(programs: Programs, processes: Processes) -> tuple[RunProcess | None, list[RunProcess]]:
    """Starts the server, its shards elsewhere, and the workers."""
    if programs.run.row.peer is not None:
        return _start_peer(programs, processes)
    server = address = None
    if programs.run.row.server is not None:
        server = processes.start("server", programs.server())
        address = await_address(processes, programs.address_file)
        for number in range(1, programs.apart + 1):
            processes.start(f"shard {number}", programs.shard(number, address))
        if programs.apart:
            _await_shards(programs, processes, address)
    ranks = range(programs.workers)
    return server, [processes.start(f"worker {rank}", programs.worker(rank, address)) for rank in ranks]


def _start_peer(programs: Programs, processes: Processes) -> tuple[RunProcess | None, list[RunProcess]]:
    """Starts a peer's servers, if it has any, and its workers: a process each, or one for all."""
    told = programs.peers
    servers = [processes.start(*each) for each in told.server_programs()]
    if told.row.leads:
        await_address(processes, told.meet)
    team = [processes.start(*each) for each in told.worker_programs(programs.peer_words)]
    return servers[0] if servers else None, team


def _await_shards(programs: Programs, processes: Processes, address: str) -> None:
    """Waits until all shards are known: a job begins with those that are."""
    wanted = programs.run.setting.servers
    while len(_status(programs, address).get("shards", ())) < wanted:
        processes.pause(f"the last of {wanted} shards")


def _status(programs: Programs, address: str) -> dict[str, list[object]]:
    asked = subprocess.run(programs.status(address), capture_output=True, text=True, check=False)
    try:
        status: dict[str, list[object]] = json.loads(asked.stdout.splitlines()[-1])
    except (IndexError, ValueError) as cause:
        raise HubringError(f"the server at {address} does not say how it is: {asked.stderr}") from cause
    return status


def _await_end(programs: Programs, processes: Processes, team: list[RunProcess], progress: Progress) -> None:
    """Watches until all have ended, while the one whom the setting names is killed."""
    fault = programs.run.setting.fault
    if fault is None:
        _watch(programs, processes, progress)
        return
    for process in processes.started:
        process.expendable = True  # an end with an error is what is measured
    pid = team[fault.rank].pid
    assert pid is not None, "a loss was asked for on another machine"
    with Loss(fault, programs.record(fault.rank), pid) as loss:
        _watch(programs, processes, progress)
    if loss.step is None:
        raise HubringError(
            f"{programs.run.label}: worker {fault.rank} ended before it could be killed at step {fault.step};"
            f" name an earlier step. {team[fault.rank].tail()}"
        )


def _watch(programs: Programs, processes: Processes, progress: Progress) -> None:
    while running := processes.running():
        processes.pause(f"the end of {', '.join(process.name for process in running)}")
        if (line := latest(programs.record(0))) is not None:
            progress(line)


def clean_environment(threads: int) -> dict[str, str]:
    """This process's variables without settings or launchers: the command lines say all of that.

    Args:
        threads: PyTorch's, in every process.
    """
    kept = {
        name: value
        for name, value in environment().items()
        if name not in _OF_TORCHRUN | _OF_PODS and not name.startswith(_OF_LAUNCHERS)
    }
    return kept | {"OMP_NUM_THREADS": str(threads)}


def await_address(processes: Processes, file: Path) -> str:
    """The address that a starting server writes into `file`; raises as `Processes.pause`."""
    while not file.exists() or not (address := file.read_text().strip()):
        processes.pause("the server's address")
    return address
