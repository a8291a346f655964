"""`ps-run`: starts a job on this machine with one command, and accepts `horovodrun`'s flags.

This module imports nothing that imports torch, so that `--help` is fast.
"""

from __future__ import annotations

import re
import sys
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.ps.config.options import Command, takes
from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.localrun import ignored_flags
from hubring.workers.localrun.host import ELSEWHERE
from hubring.workers.localrun.job import LocalJob

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=Command, context_settings={"allow_interspersed_args": False})
@takes(signature(LocalJob, eval_str=True).parameters.values(), ignored_flags.options())
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="your script, with or without python in front of it"),
    ] = None,
    check_build: Annotated[
        bool, typer.Option("-cb", "--check-build", help="print the features of this build, and exit")
    ] = False,
    version: Annotated[
        bool, typer.Option("-v", "--version", help="print the version of Horovod's API, and exit")
    ] = False,
    jsrun: Annotated[bool | None, typer.Option(hidden=True)] = None,
    **flags: Any,
) -> None:
    """Start a server and workers on this machine, and run a script on each worker.

    The script can use hubring or horovod.torch. Each line of output starts with the worker's rank. If one
    worker fails, ps-run stops all workers, and exits with the exit code of the first failure.

    ps-run accepts horovodrun's other flags, and prints which of them have no effect.
    """
    if version:
        print("0.28.1")
        raise SystemExit(0)
    raise SystemExit(_check_build() if check_build else _run(command or [], flags, jsrun=jsrun))


def main() -> None:
    """Console entry of `ps-run`."""
    elsewhere = "set other options of the server and the workers with PS_* variables: PS_MODE=asp ps-run ..."
    terminal.run(app, "ps-run", elsewhere=elsewhere)


def _check_build() -> int:
    from hubring.workers.horovod.world.build import check_build

    print(check_build())
    return 0


def _run(command: list[str], flags: dict[str, Any], *, jsrun: bool | None) -> int:
    try:
        words = script(command)
        if jsrun:
            raise UsageError(f"--jsrun: {ELSEWHERE}")
        for line in ignored_flags.notices(name for name in ignored_flags.IDLE if flags.pop(name) is not None):
            print(f"ps-run: {line}", file=sys.stderr)
        return LocalJob(**flags).run(words)
    except HubringError as error:
        print(f"ps-run: {error}", file=sys.stderr)
        terminal.last_line({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code


def script(command: list[str]) -> list[str]:
    """Returns the script and its arguments, without a leading `python` and `-u`.

    Raises:
        UsageError: The command names no script, or a file that does not exist.
    """
    left = command
    if left and re.fullmatch(r"python(3(\.\d+)?)?", Path(left[0]).name):
        left = left[1:]
        left = left[1:] if left[:1] == ["-u"] else left
    if not left or left[0].startswith("-"):
        found = f"{left[0]!r} is not a script" if left else "the command line names none"
        raise UsageError(f"a script is missing: {found}; for example: ps-run -np 2 train.py [ARGS]...")
    if not Path(left[0]).is_file():  # checked here so that the error appears once, not once per worker
        raise UsageError(f"script {left[0]} does not exist; for example: ps-run -np 2 train.py [ARGS]...")
    return left


if __name__ == "__main__":
    main()
