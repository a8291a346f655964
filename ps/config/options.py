"""Command-line options, made from the settings that a command takes."""

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

ConfigFile = Annotated[
    Path | None, typer.Option(help="TOML file with the tables [server], [worker] and [submit]")
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def options(config: type[Struct], names: Collection[str] | None = None) -> Iterator[Parameter]:
    """An option for each setting of a config; with `names`, only for those. Not given, it is None."""
    for field, flag in declared(config, names):
        words = default(field, flag)
        kind, choices = _kind(field.type)
        option = typer.Option(
            settings.flag(field.name),
            help=flag.help + (f" [default: {words}]" if words else ""),
            metavar=f"<{'|'.join(choices)}>" if choices else None,
            hidden=flag.hidden,
            rich_help_panel=flag.group.capitalize(),
        )
        yield parameter(field.name, kind, option)


def parameter(name: str, kind: Any, option: object) -> Parameter:
    """A command's parameter that is None where the command line does not give it."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def takes(*groups: Iterable[Parameter]) -> Callable[[_Function], _Function]:
    """Gives a command more options than its own parameters; their values come as keywords."""

    def add(command: _Function) -> _Function:
        own = signature(command, eval_str=True).parameters.values()
        named = [each for each in own if each.kind is not Parameter.VAR_KEYWORD]
        parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in chain(*groups, named)]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return add


class Command(TyperCommand):
    """A command whose `--help` lists options under headings, as plain text that can be copied."""

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
    """What the command line turns text into, and the words it may be; the config checks the rest."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Literal:
        return str, arguments
    if origin is tuple:
        return list[_kind(arguments[0])[0]], ()  # type: ignore[misc]
    if origin in (Annotated, Union, UnionType):
        return _kind(arguments[0])
    return declared, ()
