"""Runs a program from its command line, and prints its result. An invalid command line also has a result.

Law: where standard output is not a terminal, or with `--json`, its last line is one JSON object. On a
terminal it is a short summary.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from hubring.ps.core.errors import HubringError

MOST_METRICS = 4
"""How many metrics a summary has."""

_PLACES = ("checkpoint", "calibration", "trace", "path")
"""Keys of a result that name a file or folder."""

_json = False
"""Whether the user asked for JSON."""


def run(app: typer.Typer, name: str, argv: Sequence[str] | None = None, *, elsewhere: str = "") -> None:
    """Runs a program and exits. An invalid command line prints a result line and exits with 2.

    Args:
        app: The program.
        name: The program's name in messages.
        argv: The arguments; None for the process's arguments.
        elsewhere: A hint for an unknown option: where it may belong.
    """
    command = get_command(app)
    _offer_json(command)
    try:
        code = command.main(argv, prog_name=name, standalone_mode=False)
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


def _offer_json(command: Any) -> None:
    """Adds the option `--json` to a command, or to all commands of a group, that do not have it."""
    if commands := getattr(command, "commands", None):
        for one in commands.values():
            _offer_json(one)
    elif all("--json" not in option.opts for option in command.params):
        command.params.append(_json_option())


def _json_option() -> Any:
    """Returns the option, taken from a command that has no other one."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def result(
        as_json: Annotated[
            bool,
            typer.Option("--json", callback=_ask_for_json, help="print the result as JSON on a terminal too"),
        ] = False,
    ) -> None:
        pass

    option = get_command(app).params[0]
    option.expose_value = False
    return option


def _ask_for_json(given: bool) -> None:
    global _json
    _json = given


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
    # mpirun gives its ranks a terminal for their output, but none for their input.
    for_person = sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty() and not _json
    text = summary(result) if for_person else json.dumps(result)
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def summary(result: Mapping[str, Any]) -> str:
    """Returns a result for a person; empty if standard error has said it all, as for errors."""
    parts = []
    if "steps" in result and not result.get("error"):
        seconds = result.get("seconds")
        parts.append(f"{result['steps']} steps" + (f" in {seconds:.1f} s" if seconds else ""))
        metrics = list(result.get("metrics", {}).items())[:MOST_METRICS]
        parts += [f"{name} {value:.6g}" for name, value in metrics if isinstance(value, int | float)]
    parts += [f"{name}: {result[name]}" for name in _PLACES if result.get(name)]
    return ", ".join(parts)


def unwind_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that cleanup code stops every child."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
