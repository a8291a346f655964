"""Command-line options, generated from the settings of a command."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from msgspec import Struct
from typer.core import TyperCommand

from hubring.ps.config import settings
from hubring.ps.config.declaration import declared, default
from hubring.ps.config.file_name import objection


def named(*sources: str) -> Callable[[Path | None], Path | None]:
    """Returns the callback of an option or argument that checks the name of a file.

    Args:
        *sources: What can set it, for the error message.
    """

    def check(file: Path | None) -> Path | None:
        if file is not None and (why := objection(str(file))):
            raise typer.BadParameter(why, param_hint=" or ".join(sources))
        return file

    return check


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        callback=named("--config"), help="TOML file with the tables [server], [worker] and [submit]"
    ),
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def options(
    config: type[Struct], names: Collection[str] | None = None, *, reads_variables: bool = False
) -> Iterator[Parameter]:
    """Yields an option for each setting of a config. Unset options are None.

    Args:
        config: The config's class.
        names: Only these settings; None for all.
        reads_variables: Whether the options read the `PS_*` variables, for a command that loads no config.
    """
    for field, flag in declared(config, names):
        words = default(field, flag)
        kind, choices = _kind(field.type)
        name, variable = settings.flag(field.name), f"PS_{field.name.upper()}"
        sources = (name, variable) if reads_variables else (name,)
        option = typer.Option(
            name,
            help=flag.help + (f" [default: {words}]" if words else ""),
            envvar=variable if reads_variables else None,
            show_envvar=False,
            metavar=f"<{'|'.join(choices)}>" if choices else None,
            callback=named(*sources) if kind is Path else None,
            hidden=flag.hidden,
            rich_help_panel=flag.group.capitalize(),
        )
        yield parameter(field.name, kind, option)


def parameter(name: str, kind: Any, option: object) -> Parameter:
    """Makes a command's parameter that is None if the command line does not set it."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def takes(*groups: Iterable[Parameter]) -> Callable[[_Function], _Function]:
    """Adds options to a command; it receives their values as keyword arguments."""

    def add(command: _Function) -> _Function:
        own = signature(command, eval_str=True).parameters.values()
        named = [each for each in own if each.kind is not Parameter.VAR_KEYWORD]
        parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in chain(*groups, named)]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return add


class Command(TyperCommand):
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
