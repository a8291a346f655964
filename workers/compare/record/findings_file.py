"""Reads results: checks version and types, and removes the speeds of withheld rows.

After `decode` no table and no drawing can show a withheld speed.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from msgspec import DecodeError, Struct, json, to_builtins
from msgspec.structs import replace

from hubring.ps.core.errors import ConfigError, HubringError, UsageError
from hubring.workers.compare.record.findings import (
    VERSION,
    Bandwidth,
    Findings,
    Prediction,
    RowResult,
    RunCurve,
    Scaling,
)
from hubring.workers.compare.record.statistics import SPEEDS

_Line = TypeVar("_Line", Prediction, Bandwidth)


class _Versioned(Struct):
    version: Any = None


def encode(findings: Findings) -> bytes:
    """Returns the findings as `results.json`.

    Raises:
        HubringError: A number is not finite. JSON would hold null for it, which means not measured.
    """
    _check_finite(to_builtins(findings, enc_hook=str), "")
    return json.format(json.encode(findings, enc_hook=str), indent=1)


def decode(text: bytes) -> Findings:
    """Returns the content of `results.json`, without the speeds of withheld rows.

    Raises:
        ConfigError: The results have another version or an invalid value.
    """
    try:
        version = json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise ConfigError(
                f"results.json has version {version!r}; expected version {VERSION}. Read it with the release"
                " that wrote it, or run the experiment again"
            )
        return _sealed(json.decode(text, type=Findings, dec_hook=lambda kind, value: kind(value)))
    except (DecodeError, UsageError) as cause:
        raise ConfigError(f"results.json: {cause}") from cause


def _check_finite(value: Any, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise HubringError(f"results: {key} is {value}, not a finite number; results.json is not written")
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
        # The count of wrong elements is no speed, so it stays.
        bandwidth=without(findings.bandwidth, time=None, algbw=None, busbw=None),
    )


def _entry(entry: RowResult) -> RowResult:
    hidden = SPEEDS if entry.withheld is not None else ()
    return replace(entry, numbers={**entry.numbers, **dict.fromkeys(hidden)})


def _curve(curve: RunCurve) -> RunCurve:
    """Removes seconds: a loss by samples shows no speed, a metric by seconds does."""
    return replace(curve, loss=[replace(point, seconds=0.0) for point in curve.loss], metric=[])


def _scaling(scaling: Scaling, sizes: set[tuple[str, int]]) -> Scaling:
    """Withholds the speeds of the numbers of workers at which the row is withheld."""
    both = zip(scaling.workers, scaling.measured, strict=True)
    return replace(scaling, measured=[None if (scaling.row, n) in sizes else value for n, value in both])
