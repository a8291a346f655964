"""Reading results: their version and their shapes are checked, and what may not be shown is taken out.

Of a row whose speed is withheld nothing gets past here that tells how fast it was, so no table and no
drawing has to think of it.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from msgspec import DecodeError, Struct, json, to_builtins
from msgspec.structs import replace

from hubring.ps.core.errors import ConfigError, HubringError, UsageError
from hubring.workers.compare.result.findings import (
    VERSION,
    Bandwidth,
    Curve,
    Entry,
    Findings,
    Prediction,
    Scaling,
)
from hubring.workers.compare.result.numbers import SPEEDS

_Line = TypeVar("_Line", Prediction, Bandwidth)


class _Versioned(Struct):
    version: Any = None


def encode(findings: Findings) -> bytes:
    """The findings as `results.json`.

    Raises:
        HubringError: A number in them is not finite; in JSON it would be null, as if it were not measured.
    """
    _check_finite(to_builtins(findings, enc_hook=str), "")
    return json.format(json.encode(findings, enc_hook=str), indent=1)


def decode(text: bytes) -> Findings:
    """What `results.json` holds, without the speeds of rows that are withheld.

    Raises:
        ConfigError: The results are of another version, or something in them is not what it should be.
    """
    try:
        version = json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise ConfigError(
                f"results.json is of version {version!r} and version {VERSION} is read here;"
                " take the program that wrote it, or run the experiment again"
            )
        return _sealed(json.decode(text, type=Findings, dec_hook=lambda kind, value: kind(value)))
    except (DecodeError, UsageError) as cause:
        raise ConfigError(f"results.json: {cause}") from cause


def _check_finite(value: Any, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise HubringError(f"the results hold {value} at {key}: no finite number, so they are not written")
    if isinstance(value, dict):
        for name, each in value.items():
            _check_finite(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_finite(each, f"{key}[{index}]")


def _sealed(findings: Findings) -> Findings:
    shut = {(each.setting, each.row) for each in findings.rows if each.withheld is not None}

    def without(lines: list[_Line], **hidden: None) -> list[_Line]:
        return [replace(each, **hidden) if (each.setting, each.row) in shut else each for each in lines]

    curves = [_curve(each) if (each.setting, each.row) in shut else each for each in findings.curves]
    sizes = {(row, findings.setting(setting).workers) for setting, row in shut}
    return replace(
        findings,
        rows=[_entry(each) for each in findings.rows],
        curves=curves,
        predictions=without(findings.predictions, measured_ms=None, error=None),
        scaling=[_scaling(each, sizes) for each in findings.scaling],
        # How many elements are wrong may well be told.
        bandwidth=without(findings.bandwidth, time=None, algbw=None, busbw=None),
    )


def _entry(entry: Entry) -> Entry:
    hidden = SPEEDS if entry.withheld is not None else ()
    return replace(entry, numbers={**entry.numbers, **dict.fromkeys(hidden)})


def _curve(curve: Curve) -> Curve:
    """A loss by samples tells no speed, a measure by seconds does."""
    return replace(curve, loss=[replace(point, seconds=0.0) for point in curve.loss], metric=[])


def _scaling(scaling: Scaling, sizes: set[tuple[str, int]]) -> Scaling:
    """Withheld where the row is with so many workers."""
    both = zip(scaling.workers, scaling.measured, strict=True)
    return replace(scaling, measured=[None if (scaling.row, n) in sizes else value for n, value in both])
