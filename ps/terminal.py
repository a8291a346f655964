"""How a program meets its command line: even a call that means nothing ends in a result."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException


def run(app: typer.Typer, name: str, argv: Sequence[str] | None = None) -> None:
    """Runs a program to its end; a wrong command line ends with 2 and a last line as any other end.

    Args:
        app: The program.
        name: What the user calls it.
        argv: Its arguments; None: the process's own.
    """
    try:
        code = app(argv, prog_name=name, standalone_mode=False)
    except TyperException as error:
        print(f"{name}: {error.format_message()}; see {name} --help", file=sys.stderr)
        print(json.dumps({"error": error.format_message(), "exit_code": 2}))
        code = 2
    raise SystemExit(code if isinstance(code, int) else 0)
