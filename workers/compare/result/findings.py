"""What `results.json`, version 3, holds, as the table and the page read it.

Every number is one of a (setting, row) over all seeds. What was not measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Number(Struct, frozen=True):
    """A number of all seeds: its median and the confidence interval of that; `values` one a seed."""

    values: list[float | None]
    median: float
    low: float
    high: float

    @property
    def seeds(self) -> int:
        """How many seeds have it."""
        return sum(value is not None for value in self.values)

    @property
    def most(self) -> float:
        """The greatest of all seeds' values."""
        return max(value for value in self.values if value is not None)


class Entry(Struct, frozen=True):
    """One way to train under one setting."""

    setting: str
    row: str
    synchronous: bool
    numbers: dict[str, Number | None]
    about: str = ""
    emulated: bool = False
    seeds: list[int] = []
    withheld: str | None = None
    failed: str | None = None
    staleness: dict[str, int] = {}

    def number(self, name: str) -> Number | None:
        """What was measured under this name, if it was."""
        return self.numbers.get(name)

    def median(self, name: str) -> float | None:
        """The median of `number`."""
        found = self.number(name)
        return None if found is None else found.median


class Point(Struct, frozen=True):
    """One reading on the way: on rank 0's clock, after so many samples of all workers."""

    seconds: float
    samples: float
    value: float


class Curve(Struct, frozen=True):
    """How one run went."""

    setting: str
    row: str
    seed: int
    loss: list[Point] = []
    metric: list[Point] = []


class Pair(Struct, frozen=True):
    """Two runs held against each other; a difference that is not finite is text."""

    first: str
    second: str
    difference: float | str
    tensor: str
    limit: float
    passed: bool
    setting: str = ""
    seed: int | None = None


class Gate(Struct, frozen=True):
    """Whether synchronous rows ended in the same parameters."""

    passed: bool
    tolerance: float
    pairs: list[Pair] = []


class Prediction(Struct, frozen=True):
    """A step as the model of cost has it, beside what was measured."""

    setting: str
    row: str
    measured_ms: float | None
    predicted_ms: float | None
    error: float | None
    calibrated: bool = False
    by: str = "formula"


class Score(Struct, frozen=True):
    """How far predictions were off, on average, where nothing was calibrated; relative."""

    mean_error: float
    settings: int


class Crossover(Struct, frozen=True):
    """From how many servers on the hub beats the ring; None: with no number of them.

    Attributes:
        setting: The key, without servers.
        measured: Among the numbers that were tried.
        predicted: By the calibrated model, if it is `calibrated`.
        calibrated: There is such a model.
        by_bytes: By the formula, which knows of nothing but bytes on links.
        formula: As people write it.
    """

    setting: str
    measured: float | None = None
    predicted: float | None = None
    calibrated: bool = False
    by_bytes: float | None = None
    formula: str = ""


class Scaling(Struct, frozen=True):
    """Samples a second of one row, by number of workers."""

    row: str
    workers: list[int]
    measured: list[float | None]
    predicted: list[float | None]


class Load(Struct, frozen=True):
    """Something that the machine was heard doing, over all runs."""

    median: float | None = None
    max: float | None = None


class Noise(Struct, frozen=True):
    """How far the figures can be trusted: the 1-minute load, and what part of the machine others took."""

    load: Load = Load()
    foreign: Load | None = None
    spread: dict[str, float | None] = {}
    quiet: bool = True
    said: list[str] = []


class Bandwidth(Struct, frozen=True):
    """One line in nccl-tests' columns; time in us, bandwidths in GB/s, `wrong` elements.

    Times are None where the row is withheld, `wrong` where nothing was compared.
    """

    setting: str
    row: str
    size: int
    count: int
    type: str
    redop: str
    time: float | None
    algbw: float | None
    busbw: float | None
    wrong: int | None


class Findings(Struct, frozen=True):
    """The whole of it."""

    version: int
    command: str
    experiment: dict[str, Any]
    machine: dict[str, Any]
    gate: Gate
    rows: list[Entry]
    job: dict[str, Any] = {}
    settings: list[dict[str, Any]] = []
    noise: Noise = field(default_factory=Noise)
    curves: list[Curve] = []
    predictions: list[Prediction] = []
    score: Score | None = None
    crossover: list[Crossover] = []
    scaling: list[Scaling] = []
    bandwidth: list[Bandwidth] = []
    commands: dict[str, list[str]] = {}
    verdict: list[str] = []

    @property
    def row_names(self) -> list[str]:
        """All rows, in the order in which they first stand."""
        named = [each.row for part in (self.rows, self.scaling, self.predictions) for each in part]
        return list(dict.fromkeys(named))

    @property
    def setting_keys(self) -> list[str]:
        """The settings that rows were run under, in order."""
        return list(dict.fromkeys(each.setting for each in self.rows))

    def under(self, setting: str) -> list[Entry]:
        """The rows that were run under a setting."""
        return [each for each in self.rows if each.setting == setting]

    def setting(self, key: str) -> Mapping[str, Any]:
        """What a setting's key stands for; empty where the results do not say."""
        return next((each for each in self.settings if each.get("key") == key), {})

    @property
    def seeds(self) -> int:
        """The most seeds that any row was run with."""
        return max((len(each.seeds) for each in self.rows), default=0)
