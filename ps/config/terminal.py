"""Runs a program from its command line, and prints its result. An invalid command line also has a result."""

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
    """Runs a program and exits. An invalid command line prints a result line and exits with 2.

    Args:
        app: The program.
        name: The program's name in messages.
        argv: The arguments; None for the process's arguments.
        elsewhere: A hint for an unknown option: where it may belong.
    """
    try:
        code = app(argv, prog_name=name, standalone_mode=False)
    except TyperException as error:
        hints = [f"see {name} --help"]
        if elsewhere and type(error).__name__ == "NoSuchOption":  # typer exports no such class
            hints.append(elsewhere)
        text = error.format_message().rstrip(".")
        print("; ".join([f"{name}: {text}", *hints]), file=sys.stderr)
        last_line({"error": text, "exit_code": 2})
        code = 2
    finally:
        if argv is None:
            ignore_stop_signals()
    raise SystemExit(code if isinstance(code, int) else 0)


def version_option(*short: str) -> Any:
    """Makes the option `--version` of a program, which prints the version and exits."""
    return typer.Option(
        *short, "--version", callback=_print_version, is_eager=True, help="print the version, and exit"
    )


def _print_version(given: bool) -> None:
    if given:
        from importlib.metadata import version  # here, because the import is slow

        print(f"Hubring {version('hubring')}")
        raise typer.Exit


def ignore_stop_signals() -> None:
    """Ignores SIGTERM and SIGUSR1 from now on: a signal during exit must not change the exit code."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def conclude(name: str, act: Callable[[], dict[str, Any]]) -> int:
    """Runs a program's action and prints its result, or its error, as the last line.

    Args:
        name: The program's name in messages.
        act: Returns the result, which has an `exit_code`.

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
    """Prints a program's result in one write, because the workers of a launcher can share an output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def unwind_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that cleanup code stops every child."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
