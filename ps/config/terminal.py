"""How a program meets its command line: even a call that means nothing ends in a result."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.exceptions import TyperException

from hubring.ps.core.errors import HubringError


def run(app: typer.Typer, name: str, argv: Sequence[str] | None = None, *, elsewhere: str = "") -> None:
    """Runs a program to its end; a wrong command line ends with 2 and a last line as any other end.

    Args:
        app: The program.
        name: What the user calls it.
        argv: Its arguments; None: the process's own.
        elsewhere: Where an option may belong that this program does not know.
    """
    try:
        code = app(argv, prog_name=name, standalone_mode=False)
    except TyperException as error:
        hints = [f"see {name} --help"]
        if elsewhere and type(error).__name__ == "NoSuchOption":  # typer exports no such class
            hints.append(elsewhere)
        print("; ".join([f"{name}: {error.format_message()}", *hints]), file=sys.stderr)
        last_line({"error": error.format_message(), "exit_code": 2})
        code = 2
    finally:
        if argv is None:
            keep_the_end()
    raise SystemExit(code if isinstance(code, int) else 0)


def keep_the_end() -> None:
    """From here on a wish to stop changes nothing: the work is done, and a process takes a while to go."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def conclude(name: str, act: Callable[[], dict[str, Any]]) -> int:
    """Runs what makes a program's result and prints that as the last line, or why there is none.

    Args:
        name: What the user calls the program.
        act: Returns the result, with its `exit_code`.

    Returns:
        The exit code.
    """
    try:
        result = act()
    except HubringError as error:
        print(f"{name}: {error}", file=sys.stderr)
        result = {"error": str(error), "exit_code": error.exit_code}
    except KeyboardInterrupt:
        result = {"error": "interrupted", "exit_code": 128 + signal.SIGINT}
    except SystemExit as stopped:
        result = {"error": "stopped by a signal", "exit_code": stopped.code}
    last_line(result)
    code: int = result["exit_code"]
    return code


def last_line(result: Mapping[str, Any]) -> None:
    """Prints a program's result, in one write: workers of one launcher may share their output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def unwind_on_sigterm() -> None:
    """Makes SIGTERM an exception, so that every child is stopped on the way out."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
