"""A job on this machine: its server, its workers, and their arguments and environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGPIPE
from typing import Annotated, Any

import typer

from hubring.ps.config.declaration import flag_words
from hubring.ps.config.environment import environment
from hubring.ps.config.sources import server_origins
from hubring.ps.core.errors import Preempted, UsageError
from hubring.ps.process.child import Child, passing_on
from hubring.ps.process.launch import PARENT_VARIABLE, STOP_SIGNALS, module_command
from hubring.workers.launchers.known_launchers import (
    HOROVOD_VARIABLES,
    LAUNCHER_VARIABLE,
    PROGRESS_VARIABLE,
    meeting_variables,
    place_variables,
)
from hubring.workers.localrun import command_line
from hubring.workers.localrun.command_line import ScriptCommand
from hubring.workers.localrun.server import GRACE_SECONDS, LocalServer
from hubring.workers.localrun.settings import LocalJobSettings, settle
from hubring.workers.localrun.supervisor import (
    AttemptEnd,
    FailurePolicy,
    FailureResponse,
    JobReport,
    Supervisor,
)
from hubring.workers.localrun.team import LocalTeam

RESTARTS = 3
"""How many workers elastic training restarts if --reset-limit is not set; and how many restarts of a job."""
RESTARTS_VARIABLE = "PS_RESTARTS"
PAUSE_SECONDS = 7.5
"""How long the hub needs to free the rank of a worker that was killed."""

_cluster = partial(typer.Option, rich_help_panel="Cluster")
_data_path = partial(typer.Option, rich_help_panel="Data path")
_debugging = partial(typer.Option, rich_help_panel="Debugging")


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job of `ps-run`; the fields are the command's flags."""

    num_proc: Annotated[
        int | None,
        _cluster(
            "-np", "-n", "--num-proc", min=1, help="number of workers [default: the hosts' slots, or 1]"
        ),
    ] = None
    hosts: Annotated[str | None, _cluster("-H", "--hosts", help="hosts of workers: localhost:SLOTS")] = None
    hostfile: Annotated[
        Path | None, _cluster("-hostfile", "--hostfile", help="file with lines such as: localhost slots=4")
    ] = None
    host_discovery_script: Annotated[
        str | None, _cluster(help="elastic: program that prints localhost:SLOTS; runs once")
    ] = None
    slots_per_host: Annotated[
        int | None, _cluster(min=1, help="slots of a host without a number [default: 1]")
    ] = None
    min_num_proc: Annotated[
        int | None,
        _cluster(
            *("--min-np", "--min-num-proc", "--min-workers"),
            min=1,
            help="elastic: fewest workers with which training continues",
        ),
    ] = None
    max_num_proc: Annotated[
        int | None,
        _cluster("--max-np", "--max-num-proc", help="elastic: most workers; ps-run starts at most -np"),
    ] = None
    reset_limit: Annotated[
        int | None, _cluster(min=0, help=f"elastic: lost workers to replace [default: {RESTARTS}]")
    ] = None
    start_timeout: Annotated[
        float, _cluster(envvar="HOROVOD_START_TIMEOUT", help="seconds within which the server must start")
    ] = 300.0
    fusion_threshold_mb: Annotated[
        int | None, _data_path(min=0, help="MiB of gradients that are exchanged together [default: 4]")
    ] = None
    output_filename: Annotated[
        Path | None, _debugging(help="folder for copies of the output: rank.N/stdout and rank.N/stderr")
    ] = None
    timeline_filename: Annotated[
        str | None, _debugging(help="file for rank 0's trace of Horovod's operations")
    ] = None
    restarts: Annotated[
        int | None,
        _cluster(
            envvar=RESTARTS_VARIABLE,
            min=0,
            help="restarts of a job that lost a process, without a newer checkpoint between them"
            f" [default: {RESTARTS} with --checkpoint-dir, else 0]",
        ),
    ] = None
    verbose: Annotated[bool, _debugging("--verbose", help="show the server's log")] = False
    page: Annotated[bool, _debugging("--page", help="print the address of the server's status page")] = False

    @property
    def size(self) -> int:
        """Number of workers.

        Raises:
            UsageError: The hosts have too few slots, or are other machines.
        """
        given = self.hosts, self.hostfile, self.host_discovery_script
        room = command_line.host_slots(*given, self.slots_per_host or 1)
        if room is not None and self.num_proc is not None and self.num_proc > room:
            raise UsageError(
                f"-np {self.num_proc}: the hosts have only {room} slot(s); add slots, or reduce -np"
            )
        return self.num_proc or room or self.min_num_proc or 1

    @property
    def elastic(self) -> bool:
        """Whether training continues when a worker is lost."""
        return self.min_num_proc is not None or self.host_discovery_script is not None

    def run(self, command: ScriptCommand, given: Mapping[str, Any]) -> int:
        """Runs a script or a module with its arguments, and returns the exit code.

        Args:
            command: The script or the module.
            given: Settings of the server and the workers by field name; None if not set.

        Raises:
            UsageError: The flags contradict each other, or name another machine.
            ConfigError: A setting is invalid.
            ServerUnreachable: The server did not start.
            DeadlineExceeded: The server did not start within `start_timeout`.
        """
        size = self.size
        settings = settle(given if self.elastic else _without_loss(given), size, environment())
        patience = self._patience(size)
        if self.elastic and settings.topology == "ring":
            settings.worker["min_workers"] = patience.least
        report = JobReport(size, settings)
        report.starting()
        most = self.restarts
        if most is None:
            most = RESTARTS if settings.checkpoints is not None else 0
        supervisor = Supervisor(most, settings.checkpoints)
        if (checkpoint := supervisor.newest()) is not None:
            report.resuming(checkpoint)
        ending = supervisor.run(
            lambda: self._attempt(size, command, settings, replace(patience), supervisor, report)
        )
        if ending.code != 128 + SIGPIPE:  # otherwise no process reads the output any more
            report.end(ending.code, ending.results, supervisor.restarts, max(0, supervisor.began))
        return ending.code

    def _attempt(
        self,
        size: int,
        command: ScriptCommand,
        settings: LocalJobSettings,
        patience: FailurePolicy,
        supervisor: Supervisor,
        report: JobReport,
    ) -> AttemptEnd:
        """Starts the server and the workers, and waits for their end."""
        flags, limit, causes = flag_words(settings.server), self.start_timeout, list[str]()
        with (
            meeting_variables(environment()) as meeting,
            LocalServer(size, flags, _variables(), verbose=self.verbose, timeout=limit) as server,
        ):
            if self.page and not self.verbose:
                report.page(server.banner)
            words = [*_program(command, server.address, settings), *command.words]
            places = [self._place(rank, size, command) | meeting for rank in range(size)]
            progress = server.progress if sys.stderr.isatty() else None
            if progress is not None:
                places[0][PROGRESS_VARIABLE] = str(progress)
            about = server.process, server.has_finished, progress
            team = LocalTeam([words] * size, places, self.output_filename, patience, *about)

            def fail(child: Child, verdict: FailureResponse) -> None:
                causes.append(f"{child.name} {child.ended}")
                restarts = verdict is FailureResponse.END and supervisor.restarts_after(child.exit_code())
                if not restarts:
                    team.say(f"{causes[-1]}; {verdict}")
                elif child.exit_code() != Preempted.exit_code:
                    # Nothing that the others could save is newer than the last checkpoint and complete.
                    server.process.kill()
                    team.kill()

            with passing_on(STOP_SIGNALS, team.signal):
                code = team.run(fail)
                # If no worker joined, the server still waits for the first. Others may have much to save.
                server.end(GRACE_SECONDS if code in (0, Preempted.exit_code) and team.results else 0.0)
        if not causes and code in (0, Preempted.exit_code):
            code = report.server_end(server, code, team.results, supervisor.newest_step())
        return AttemptEnd(code, causes[-1] if causes else "", team.asked, team.results)

    def _patience(self, size: int) -> FailurePolicy:
        least, most = self.min_num_proc or size, self.max_num_proc or size
        if not 1 <= least <= size <= most:
            raise UsageError(
                f"-np {size} --min-num-proc {least} --max-num-proc {most}: expected"
                " 1 <= min-num-proc <= np <= max-num-proc"
            )
        if not self.elastic:
            return FailurePolicy(least=size)
        if most > size:
            print(f"ps-run: --max-num-proc {most}: ps-run starts at most -np {size} workers", file=sys.stderr)
        restarts = RESTARTS if self.reset_limit is None else self.reset_limit
        return FailurePolicy(least, restarts, pause=PAUSE_SECONDS)

    def _place(self, rank: int, size: int, command: ScriptCommand) -> dict[str, str]:
        """Returns all environment variables of a worker."""
        variables = {**_variables(), **place_variables(rank, size, rank, size, 0)}
        # Otherwise the last lines before a crash are lost.
        variables |= {LAUNCHER_VARIABLE: "ps-run", "PYTHONUNBUFFERED": "1"}
        if command.safe_path:
            variables["PYTHONSAFEPATH"] = "1"
        if self.timeline_filename:
            variables["HOROVOD_TIMELINE"] = self.timeline_filename
        if self.fusion_threshold_mb is not None:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(self.fusion_threshold_mb << 20)
        if self.elastic:
            variables["HOROVOD_ELASTIC"] = "1"
        return variables


def _variables() -> dict[str, str]:
    """Returns the environment variables of the server and the workers, which `ps-run` restarts itself.

    Without the place of a worker that has started `ps-run`.
    """
    own = {RESTARTS_VARIABLE, *HOROVOD_VARIABLES.values()}
    inherited = {name: text for name, text in environment().items() if name not in own}
    return {**inherited, PARENT_VARIABLE: str(os.getpid())}


def _without_loss(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of a job that needs all its workers: the server must not go on without one."""
    chosen = given.get("on_loss") is not None or "on_loss" in server_origins({}, None, environment())
    return given if chosen else {**given, "on_loss": "wait"}


def _program(command: ScriptCommand, server: str, settings: LocalJobSettings) -> list[str]:
    """Returns the command line of a worker, up to the script."""
    flags = ["--server", server, "--as-horovod", *flag_words(settings.worker)]
    flags += ["--module"] if command.is_module else []
    return module_command("hubring.workers.programs.ps_worker", *flags, options=command.options)
