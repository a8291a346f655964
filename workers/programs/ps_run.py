"""`ps-run`: starts a job on this machine with one command, and accepts `horovodrun`'s flags.

This module imports nothing that imports torch, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from inspect import signature
from signal import SIGINT, SIGPIPE, SIGTERM, SIGUSR1
from typing import Annotated, Any, NoReturn

import typer

from hubring.ps.config import terminal
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.terminal import CommandWithGroups, options, takes
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import Preempted, UsageError
from hubring.ps.process.child import passing_on
from hubring.ps.process.output import drop_output
from hubring.workers.localrun import command_line
from hubring.workers.localrun.command_line import ELSEWHERE, other_python, parse_command
from hubring.workers.localrun.job import LocalJob
from hubring.workers.localrun.settings import DEFAULTS, SERVER, WORKER

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=CommandWithGroups, context_settings={"allow_interspersed_args": False})
@takes(
    signature(LocalJob, eval_str=True).parameters.values(),
    options(WorkerConfig, WORKER),
    options(ServerConfig, SERVER, defaults=DEFAULTS),
    command_line.ignored_options(),
)
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]...", help="your script; python and its options may stand in front of it"
        ),
    ] = None,
    check_build: Annotated[
        bool, typer.Option("-cb", "--check-build", help="print the features of this build, and exit")
    ] = False,
    module: terminal.IsModule = False,
    version: Annotated[bool, terminal.version_option("-v")] = False,
    jsrun: Annotated[bool | None, typer.Option(hidden=True)] = None,
    **flags: Any,
) -> None:
    """Start a server and workers on this machine, and run a script on each worker.

    The script can use hubring or horovod.torch. Each line of output starts with the worker's rank. Rank 0
    gets the standard input. If one worker fails, ps-run stops all workers, and exits with the exit code of
    the first failure.

    ps-run accepts horovodrun's other flags, and prints which of them have no effect.
    """
    if check_build:
        from hubring.workers.horovod import basics  # late: torch

        print(basics.check_build())
        raise SystemExit
    raise SystemExit(terminal.conclude("ps-run", lambda: _run(command or [], module, flags, jsrun=jsrun)))


def main() -> None:
    """Console entry of `ps-run`."""
    elsewhere = "for N GPUs use -np N; set other options with PS_* variables: PS_TRACE=DIR ps-run ..."
    terminal.run(app, "ps-run", elsewhere=elsewhere)


def _stop(number: int) -> NoReturn:
    raise Preempted("stopped on request while no worker ran")


def _run(command: list[str], is_module: bool, flags: dict[str, Any], *, jsrun: bool | None) -> int:
    try:
        parsed = parse_command(command, is_module=is_module)
        if jsrun:
            raise UsageError(f"--jsrun: {ELSEWHERE}")
        if other := other_python(command):
            print(f"ps-run: workers run {sys.executable}, not {other}", file=sys.stderr)
        for word in {"-np", "--num-proc", "--topology"}.intersection(command):
            print(f"ps-run: {word} stands after the script, which gets it; ours go before", file=sys.stderr)
        for line in command_line.ignored_notices(
            name for name in command_line.IGNORED_FLAGS if flags.pop(name) is not None
        ):
            print(f"ps-run: {line}", file=sys.stderr)
        given = {name: flags.pop(name) for name in (*SERVER, *WORKER)}
        with passing_on((SIGTERM, SIGUSR1), _stop):
            return LocalJob(**flags).run(parsed, given)
    except KeyboardInterrupt:  # before the workers started; they get it later
        print("ps-run: interrupted before the workers started", file=sys.stderr)
        return 128 + SIGINT
    except Preempted as stop:
        print(f"ps-run: {stop.text} (exit code {stop.code})", file=sys.stderr)
        return stop.exit_code
    except BrokenPipeError:  # the reader of our own lines is gone
        for stream in (sys.stdout, sys.stderr):
            drop_output(stream.buffer)
        return 128 + SIGPIPE


if __name__ == "__main__":
    main()
