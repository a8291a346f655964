"""A program's command line: options made from settings, and the result, also of an invalid command line.

Law: where standard output is not a terminal, or with `--json`, its last line is one JSON object. On a
terminal it is a short summary.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import typer
from msgspec import Struct
from typer.core import TyperCommand
from typer.exceptions import TyperException
from typer.main import get_command

from hubring.ps.config.declaration import declared_settings, default_in_words, flag
from hubring.ps.config.environment import spare_forks
from hubring.ps.config.values import file_name_objection
from hubring.ps.core.errors import HubringError
from hubring.ps.core.standard_streams import fill_missing, is_terminal


def named(*sources: str) -> Callable[[Path | None], Path | None]:
    """Returns the callback of an option or argument that checks the name of a file.

    Args:
        *sources: What can set it, for the error message.
    """

    def check(file: Path | None) -> Path | None:
        if file is not None and (why := file_name_objection(str(file))):
            raise typer.BadParameter(why, param_hint=" or ".join(sources))
        return file

    return check


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        callback=named("--config"), help="TOML file with the tables [server], [worker] and [submit]"
    ),
]

IsModule = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m")]

_P = ParamSpec("_P")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def options(
    config: type[Struct],
    names: Collection[str] | None = None,
    *,
    reads_variables: bool = False,
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Parameter]:
    """Yields an option for each setting of a config. Unset options are None.

    Args:
        config: The config's class.
        names: Only these settings; None for all.
        reads_variables: Whether the options read the `PS_*` variables, for a command that loads no config.
        defaults: The command's own defaults in words, by name.
    """
    for field, text in declared_settings(config, names):
        words = defaults.get(field.name) or default_in_words(field, text)
        kind, choices = _kind(field.type)
        name, variable = flag(field.name), f"PS_{field.name.upper()}"
        sources = (name, variable) if reads_variables else (name,)
        option = typer.Option(
            name,
            help=text.help + (f" [default: {words}]" if words else ""),
            envvar=variable if reads_variables else None,
            show_envvar=False,
            metavar=f"<{'|'.join(choices)}>" if choices else None,
            callback=named(*sources) if kind is Path else None,
            autocompletion=_completed(choices) if choices else None,
            hidden=text.hidden,
            rich_help_panel=text.group.capitalize(),
        )
        yield parameter(field.name, kind, option)


def _completed(choices: tuple[str, ...]) -> Callable[[], list[str]]:
    return lambda: list(choices)


def parameter(name: str, kind: Any, option: object, default: object = None) -> Parameter:
    """Makes a command's parameter."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def option(name: str, kind: type, about: str, default: object = None, **limits: Any) -> Parameter:
    """Makes an option of a command; `limits` are `min` and `max` of a number."""
    return parameter(name, kind, typer.Option(flag(name), help=about, **limits), default)


def takes(*groups: Iterable[Parameter]) -> Callable[[_Function], _Function]:
    """Adds options to a command; it receives their values as keyword arguments, named or not."""

    def add(command: _Function) -> _Function:
        added = {each.name: each for each in chain(*groups)}
        own = signature(command, eval_str=True).parameters.values()
        rest = [each for each in own if each.kind is not Parameter.VAR_KEYWORD and each.name not in added]
        parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in (*added.values(), *rest)]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return add


class CommandWithGroups(TyperCommand):
    """A command whose `--help` groups options under headings, in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = f"{parameter.param_type_name.capitalize()}s"
                heading = getattr(parameter, "rich_help_panel", None) or kind
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _kind(declared: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns the type to which the command line converts text, and the choices; the config validates."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Literal:
        return str, arguments
    if origin is tuple:
        return list[_kind(arguments[0])[0]], ()  # type: ignore[misc]
    if origin in (Annotated, Union, UnionType):
        return _kind(arguments[0])
    return declared, ()


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
    spare_forks()
    fill_missing()
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


def conclude(name: str, act: Callable[[], dict[str, Any] | int]) -> int:
    """Runs a program's action and prints its result, or its error, as the last line.

    Args:
        name: The program's name in messages.
        act: Returns the result, whose `exit_code` is 0 if it has none, or the exit code if there is nothing
            left to print.

    Returns:
        The exit code.
    """
    try:
        if isinstance(result := act(), int):
            return result
    except HubringError as error:
        print(f"{name}: {error}", file=sys.stderr)
        result = {"error": str(error), "exit_code": error.exit_code}
    except KeyboardInterrupt:
        result = {"error": "interrupted", "exit_code": 128 + signal.SIGINT}
    except SystemExit as stopped:
        result = {"error": "stopped by a signal", "exit_code": stopped.code}
    last_line(result)
    code: int = result.get("exit_code", 0)
    return code


def concludes(name: str) -> Callable[[Callable[_P, dict[str, Any]]], Callable[_P, None]]:
    """Makes a function the command of a program, which it ends as `conclude` does."""

    def make(act: Callable[_P, dict[str, Any]]) -> Callable[_P, None]:
        @wraps(act)
        def command(*args: _P.args, **kwargs: _P.kwargs) -> None:
            raise SystemExit(conclude(name, lambda: act(*args, **kwargs)))

        return command

    return make


def last_line(result: Mapping[str, Any]) -> None:
    """Prints a program's result in one write, because the workers of a launcher can share an output."""
    # mpirun gives its ranks a terminal for their output, but none for their input.
    for_person = is_terminal(sys.stdout) and is_terminal(sys.stdin) and not _json
    text = summary(result) if for_person else json.dumps(result)
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def summary(result: Mapping[str, Any]) -> str:
    """Returns a result for a person; empty if standard error shows it already, as for errors."""
    parts = []
    if "steps" in result and not result.get("error"):
        seconds = result.get("seconds")
        steps = result["steps"] - result.get("resumed_at", 0)
        parts.append(f"{steps} steps" + (f" in {seconds:.1f} s" if seconds else ""))
        metrics = list(result.get("metrics", {}).items())[:MOST_METRICS]
        parts += [f"{name} {value:.6g}" for name, value in metrics if isinstance(value, int | float)]
    parts += [f"{name}: {result[name]}" for name in _PLACES if result.get(name)]
    return ", ".join(parts)


def unwind_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that cleanup code stops every child."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
