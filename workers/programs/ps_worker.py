"""`ps-worker`: runs a training script, or a built-in job, as one worker.

This module imports only typer and the settings, so that `--help` is fast.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.ps.config.terminal import CommandWithGroups, ConfigFile, options, takes
from hubring.ps.config.worker import WorkerConfig

if TYPE_CHECKING:
    from hubring.ps.observe.logs import LogOrigin

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

JOBS = {"digits": "hubring.workers.examples.digits", "char-lm": "hubring.workers.examples.char_lm"}

WORKER_PAUSE_SECONDS = 5.0
"""Before the first restart of a lost worker: the hub frees its rank 4 s after its connection closed."""


@app.command(cls=CommandWithGroups, context_settings={"allow_interspersed_args": False})
@takes(options(WorkerConfig))
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT] [ARGS]...", help="your script and its arguments [default: a built-in --job]"
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m")
    ] = False,
    version: Annotated[bool, terminal.version_option()] = False,
    config: ConfigFile = None,
    **flags: object,
) -> None:
    """Train as one worker: through a hub, around a ring, or alone.

    Pass arguments to a built-in job after --, as in: ps-worker --job digits -- --epochs 3

    ps-worker bench measures the exchange; see ps-worker bench --help

    ps-worker env --explain prints this worker's rank and settings, and the source of each
    """
    raise SystemExit(_run(flags, config, command or [], is_module=module))


def main() -> None:
    """Console entry of `ps-worker`."""
    if sys.argv[1:2] == ["bench"]:  # a subcommand; any other first argument names a script
        from hubring.workers.bench import cli

        cli.main(sys.argv[2:])
    if sys.argv[1:2] == ["env"]:
        from hubring.workers.programs import explain

        explain.main(sys.argv[2:])
    elsewhere = "pass arguments to a built-in job after --: ps-worker --job digits -- --epochs 3"
    terminal.run(app, "ps-worker", elsewhere=elsewhere)


def _run(flags: dict[str, object], config_file: Path | None, words: list[str], *, is_module: bool) -> int:
    from hubring.ps.config.environment import environment
    from hubring.ps.config.sources import load_worker
    from hubring.ps.core.errors import HubringError
    from hubring.ps.observe import logs
    from hubring.ps.process.launch import PARENT_VARIABLE, end_with_parent
    from hubring.ps.process.restarts import Restarts, as_child, is_supervised, supervise
    from hubring.ps.security.access import check_token_file
    from hubring.ps.security.certificate import load_certificate
    from hubring.ps.security.guard import Role
    from hubring.workers.programs import node_launcher

    try:
        config = load_worker(flags, config_file)
        if config.server is not None:  # before the import of torch, which takes seconds
            check_token_file(config.token_file, Role.WORKER)
            load_certificate(config.tls, serves=False)
        if config.restarts and not is_supervised(environment()):
            restarts = Restarts(config.restarts, WORKER_PAUSE_SECONDS)
            begin = as_child("ps-worker", "hubring.workers.programs.ps_worker", environment())
            return supervise("ps-worker", begin, restarts)
        origin = logs.configure(config.log_format, logger=logs.OURS)
        if node_launcher.wanted(config):  # the launcher does not train, and does not import torch
            again = ["--module"] if is_module else []
            return node_launcher.run(config, flags, config_file, [*again, "--", *words])
        # Ends with the command that started it, if any. A process of the script inherits the variable.
        end_with_parent(int(environment().get(PARENT_VARIABLE, 0)))
        return _train(config, origin, words, is_module=is_module)
    except HubringError as error:
        return _end({"error": str(error), "exit_code": error.exit_code}, f"ps-worker: {error}\n")


def _train(config: WorkerConfig, origin: LogOrigin, words: list[str], *, is_module: bool) -> int:
    from hubring.workers.run_script import train

    outcome = train(config, origin, JOBS[config.job], config.job, words, is_module=is_module)
    code = _end(outcome.last_line, outcome.text("ps-worker"))
    if outcome.stuck:
        # A broken ring leaves threads blocked inside torch. No call can end them.
        sys.stderr.flush()
        os._exit(code)
    return code


def _end(result: dict[str, Any], text: str) -> int:
    """Prints the text of the error and the result line, and returns the exit code."""
    print(text, file=sys.stderr, end="", flush=True)
    terminal.last_line(result)
    code: int = result["exit_code"]
    return code


if __name__ == "__main__":
    main()
