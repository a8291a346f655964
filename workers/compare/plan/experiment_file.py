"""An experiment as a file: reads TOML or a built-in experiment, overridden by flags, and writes TOML.

A single value can replace a list, and a quantity can have a unit.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import tomli_w
from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config.declaration import flag
from hubring.ps.config.sources import allowed, read_toml, refuse_unknown
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.workers.compare.plan import setting
from hubring.workers.compare.plan.experiment import (
    ComputeTable,
    Experiment,
    FaultTable,
    LinkTable,
    PricesTable,
    StragglerTable,
)


def to_toml(values: Mapping[str, Any]) -> str:
    """Returns a table as TOML, without values that are None, which TOML cannot express.

    Raises:
        TypeError: A value is not text, a number, a Boolean, a list of them or a mapping.
    """

    def known(table: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in table.items() if value is not None}
        return {name: known(value) if isinstance(value, Mapping) else value for name, value in given.items()}

    return tomli_w.dumps(known(values))


_TABLES: Mapping[str, type[Struct]] = {
    "link": LinkTable,
    "straggler": StragglerTable,
    "fault": FaultTable,
    "compute": ComputeTable,
    "prices": PricesTable,
}
_QUANTITIES = {
    "rate": setting.read_rate,
    "latency": setting.read_seconds,
    "jitter": setting.read_seconds,
    "seconds": setting.read_seconds,
    "step": setting.read_seconds,
    "timeout": setting.read_seconds,
}
_WITH_TABLE = {
    "rate": ("link", "rate"),
    "latency": ("link", "latency"),
    "jitter": ("link", "jitter"),
    "workers_per_host": ("link", "workers_per_host"),
    "compute": ("compute", "step"),
    "straggler_ranks": ("straggler", "ranks"),
    "straggler_shape": ("straggler", "shape"),
}
"""Flags that set a table's key."""

SHIPPED = files("hubring.workers.compare").joinpath("experiments")


def load_experiment(source: str | None, flags: Mapping[str, object]) -> Experiment:
    """Reads an experiment.

    Args:
        source: A TOML file or the name of a built-in experiment; None: flags only.
        flags: Values from the command line by name; None where a flag is not set. Lists are
            comma-separated text.

    Raises:
        UsageError: A value is invalid.
    """
    values = {} if source is None else dict(_read(find_experiment(source)))
    if flags.get("job") is not None or flags.get("script") is not None:
        values = {name: value for name, value in values.items() if name not in ("job", "script")}
    given = {name: value for name, value in flags.items() if value is not None}
    for name in sorted(given, key=lambda name: name in _WITH_TABLE):  # whole tables before their keys
        _override(values, name, given[name])
    if "script" not in values:
        values.setdefault("job", "digits")
    try:
        experiment = Experiment(**values)
    except UsageError as cause:
        raise UsageError(f"{source}: {cause}" if source else str(cause)) from cause
    for row in experiment.ways:
        if row.peer is not None:
            row.peer.check()
    if experiment.script is not None and not experiment.script.is_file():
        raise UsageError(
            f"no script {experiment.script}; relative paths start at the folder of the experiment's file,"
            " with --script at the current folder"
        )
    return experiment


def find_experiment(source: str) -> Path:
    """Returns the file with that name, else the file of the built-in experiment.

    Raises:
        UsageError: Neither exists.
    """
    if Path(source).is_file():
        return Path(source)
    if source in (known := shipped()):
        return known[source]
    guess = difflib.get_close_matches(source, known, n=1)
    hint = f"did you mean {guess[0]}?" if guess else f"built-in are {', '.join(known)}"
    raise UsageError(f"no file and no built-in experiment {source}; {hint}")


def shipped() -> dict[str, Path]:
    """Returns the files of the built-in experiments by name."""
    found = {Path(str(each)).stem: Path(str(each)) for each in SHIPPED.iterdir()}
    return dict(sorted((name, path) for name, path in found.items() if path.suffix == ".toml"))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_toml(path)
    except ConfigError as cause:
        raise UsageError(str(cause)) from cause
    values = {"name": path.stem} | _converted(Experiment, content, f"{{name}} = {{value!r}} in {path}")
    script = values.get("script")
    if script is not None and not script.is_absolute():  # relative to the experiment's file
        values["script"] = path.parent / script
    return values


def _override(values: dict[str, Any], name: str, value: object) -> None:
    """Replaces a value of the file with that of a flag."""
    spelling = f"{flag(name)} {value}".replace("{", "{{").replace("}", "}}")
    if name in _SEVERAL:
        table, content = _SEVERAL[name](str(value))
    elif name in _WITH_TABLE:
        table, key = _WITH_TABLE[name]
        content = {key: _listed(value)}
    else:
        try:
            given = shlex.split(str(value)) if name == "arguments" else _listed(value)
            given = value if name == "metric_regex" else given  # which can have commas
        except ValueError as cause:
            raise UsageError(f"--arguments {value}: {cause}") from cause
        values |= _converted(Experiment, {name: given}, spelling)
        return
    fresh, there = _converted(_TABLES[table], content, spelling), values.get(table)
    if there is None and name in ("straggler_ranks", "straggler_shape"):
        raise UsageError(
            f"{flag(name)} {value}: the delay is missing; add --straggler KIND:SECONDS, such as pareto:20ms"
        )
    values[table] = _TABLES[table](**fresh) if there is None else msgspec.structs.replace(there, **fresh)


def _listed(value: object) -> object:
    return value.split(",") if isinstance(value, str) and "," in value else value


def _straggler(text: str) -> tuple[str, dict[str, object]]:
    kind, colon, seconds = text.rpartition(":")
    content = {"seconds": _listed(seconds)}
    if colon:
        content["kind"] = kind
    return "straggler", content


def _kill(text: str) -> tuple[str, dict[str, object]]:
    found = re.fullmatch(r"(shard|standby|coordinator)?([0-9]*)@([0-9]+)", text)
    if found is None or not (found[1] or found[2]):
        raise UsageError(
            f"--kill {text}: expected RANK@STEP, both counted from 0, as in 1@100, which kills the worker of"
            " rank 1 before its step 100; or shard0@100, standby0@100 or coordinator@100"
        )
    return "fault", {"victim": found[1] or "worker", "rank": int(found[2] or 0), "step": int(found[3])}


_SEVERAL = {"straggler": _straggler, "kill": _kill}
"""Flags that set several keys of a table; each function returns the table's name and the keys."""


def _converted(kind: type[Struct], content: Mapping[str, object], spelling: str) -> dict[str, Any]:
    """Converts values to the types of `kind`'s fields."""
    types = {field.name: field.type for field in fields(kind)}
    converted = {}
    for name, value in content.items():
        where = spelling.format(name=name, value=value)
        try:
            refuse_unknown(where, name, types)
        except ConfigError as cause:
            raise UsageError(str(cause)) from cause
        converted[name] = _value(name, value, types[name], where)
    return converted


def _value(name: str, value: object, kind: Any, where: str) -> object:
    if name in _TABLES:
        return _table(_TABLES[name], value, where, name)
    if isinstance(value, Path):
        return value
    several = get_origin(kind) is tuple
    given = value if isinstance(value, list) or not several else [value]
    try:
        read = _QUANTITIES.get(name)
        if read is not None and not (name == "step" and isinstance(given, int)):
            given = [read(each) for each in given] if isinstance(given, list) else read(given)
        text = isinstance(given, str) or (isinstance(given, list) and any(isinstance(x, str) for x in given))
        return msgspec.convert(given, kind, strict=not text, dec_hook=lambda type_, x: type_(x))
    except UsageError as cause:
        raise UsageError(f"{where}: {cause}") from cause
    except (msgspec.ValidationError, TypeError) as cause:
        texts = get_origin(kind) is tuple and get_args(kind)[0] is str
        expected = "text or a list of texts" if texts else allowed(kind)
        raise UsageError(f"{where}: expected {expected}") from cause


def _table(kind: type[Struct], value: object, where: str, name: str) -> Struct:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected a table [{name}]")
    values = _converted(kind, value, f"{{name}} = {{value!r}} in [{name}], {where.rpartition(' in ')[2]}")
    missing = [field.name for field in fields(kind) if field.required and field.name not in values]
    if missing:
        raise UsageError(f"[{name}] has no {', '.join(missing)}; add it")
    return kind(**values)
