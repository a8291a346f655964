"""Reading results: their version and their shapes are checked, and what may not be shown is taken out.

Of a row whose speed is withheld nothing gets past here that tells how fast it was, so no table and no
drawing has to think of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from hubring.ps.core.errors import ConfigError
from hubring.workers.compare.result.findings import Bandwidth, Curve, Entry, Findings, Prediction, Scaling
from hubring.workers.compare.result.numbers import SPEEDS

VERSION = 3


def read(results: Mapping[str, Any]) -> Findings:
    """What `results.json` holds, without the speeds of rows that are withheld.

    Raises:
        ConfigError: The results are of another version, or something in them is not what it should be.
    """
    if results.get("version") != VERSION:
        raise ConfigError(
            f"results.json is of version {results.get('version')!r} and version {VERSION} is read here;"
            " take the program that wrote it, or run the experiment again"
        )
    try:
        return _sealed(msgspec.convert(results, Findings))
    except msgspec.ValidationError as cause:
        raise ConfigError(f"results.json: {cause}") from cause


def _sealed(findings: Findings) -> Findings:
    shut = {(each.setting, each.row) for each in findings.rows if each.withheld is not None}
    return replace(
        findings,
        rows=[_entry(each) for each in findings.rows],
        curves=[_curve(each) if (each.setting, each.row) in shut else each for each in findings.curves],
        predictions=[
            _prediction(each) if (each.setting, each.row) in shut else each for each in findings.predictions
        ],
        scaling=[_scaling(each, _sizes(each.row, shut, findings)) for each in findings.scaling],
        bandwidth=[
            _bandwidth(each) if (each.setting, each.row) in shut else each for each in findings.bandwidth
        ],
    )


def _entry(entry: Entry) -> Entry:
    if entry.withheld is None:
        return entry
    return replace(
        entry, numbers={name: None if name in SPEEDS else value for name, value in entry.numbers.items()}
    )


def _curve(curve: Curve) -> Curve:
    """A loss by samples tells no speed, a measure by seconds does."""
    return replace(curve, loss=[replace(point, seconds=0.0) for point in curve.loss], metric=[])


def _prediction(prediction: Prediction) -> Prediction:
    return replace(prediction, measured_ms=None, error=None)


def _bandwidth(line: Bandwidth) -> Bandwidth:
    """How many elements are wrong may well be told."""
    return replace(line, time=None, algbw=None, busbw=None)


def _sizes(row: str, shut: set[tuple[str, str]], findings: Findings) -> set[int]:
    """The numbers of workers with which a row is withheld."""
    return {findings.setting(setting).get("workers", 0) for setting, name in shut if name == row}


def _scaling(scaling: Scaling, sizes: set[int]) -> Scaling:
    measured = [
        None if size in sizes else value
        for size, value in zip(scaling.workers, scaling.measured, strict=True)
    ]
    return replace(scaling, measured=measured)
