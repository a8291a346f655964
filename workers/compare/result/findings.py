"""What `results.json`, version 3, holds: made by the judging code, read by every table and the page.

Every number is one of a (setting, row) over all seeds. What was not measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from hubring.ps.core.errors import ConfigError
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.job import Job
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.result.statistics import median_interval

VERSION = 3


class Number(Struct, frozen=True):
    """A number of all seeds: its median and the confidence interval of that; `values` one a seed."""

    values: list[float | None]
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float | None]) -> Number | None:
        """The number of these values; None where no seed has one."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        interval = median_interval(known)
        return Number(list(values), interval.median, interval.low, interval.high)

    @property
    def complete(self) -> bool:
        """Whether every seed has it."""
        return None not in self.values

    @property
    def seeds(self) -> int:
        """How many seeds have it."""
        return sum(value is not None for value in self.values)

    @property
    def most(self) -> float:
        """The greatest of all seeds' values."""
        return max(value for value in self.values if value is not None)


class Entry(Struct, frozen=True, kw_only=True):
    """One way to train under one setting.

    Attributes:
        setting: The setting's key.
        row: The row's name.
        about: What it does, in one sentence.
        synchronous: It must end in the same parameters as one process with the whole batch.
        emulated: Workers slept for a part of every step.
        seeds: In the order of all values.
        withheld: Why no speed is shown; None: they are.
        failed: How many of its runs did not come to their end, and why; None: all did.
        numbers: By the names in `hubring.workers.compare.result.numbers`; None where no seed has one. A
            speed is None as well where a run diverged: those that were left would race for all.
        staleness: How many pushes had which, over all seeds.
    """

    setting: str
    row: str
    about: str = ""
    synchronous: bool
    emulated: bool = False
    seeds: list[int] = []
    withheld: str | None = None
    failed: str | None = None
    numbers: dict[str, Number | None]
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


class Pair(Struct, frozen=True, kw_only=True):
    """Two runs held against each other; a difference that is not finite is text, for JSON.

    Attributes:
        setting: Key of the setting in which they ran.
        seed: Their seed.
        first: Row that is measured against.
        second: Row that is judged.
        difference: Largest relative difference of any tensor.
        tensor: Where that is, or what does not fit at all.
        limit: What was allowed; 0: every bit must be the same.
        wrong: Elements that differ by more; all of the first's where the two do not fit at all.
        steps: After so many steps; None: at the end.
        final: The difference at the end.
        turn: Which of the runs with this seed both are.
        passed: The difference is within the limit.
    """

    setting: str = ""
    seed: int | None = None
    first: str
    second: str
    difference: float | str
    tensor: str
    limit: float
    wrong: int = 0
    steps: int | None = None
    final: float | str = 0.0
    turn: int = 0
    passed: bool

    def __str__(self) -> str:
        allowed = f"at most {self.limit:g}" if self.limit else "no difference at all"
        turn = f", turn {self.turn}" if self.turn else ""
        found = f"{float(self.difference):.2g} in {self.tensor} (seed {self.seed}{turn})"
        elements = "1 element" if self.wrong == 1 else f"{self.wrong:,} elements"
        return f"{self.second} differs from {self.first} by {found}, {elements} in all; {allowed} is allowed"


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


class Accuracy(Struct, frozen=True):
    """How far predictions were off, on average, where nothing was calibrated; relative."""

    mean_error: float
    settings: int


class Crossover(Struct, frozen=True):
    """From how many servers on the hub beats the ring; None: with no number of them.

    Attributes:
        setting: The key, without servers.
        tried: The numbers of servers that were measured.
        measured: Among the numbers that were tried.
        predicted: By the calibrated model, if it is `calibrated`.
        calibrated: There is such a model.
        by_bytes: By the formula, which knows of nothing but bytes on links.
        formula: As people write it.
    """

    setting: str
    tried: list[int] = []
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


class Findings(Struct, frozen=True, kw_only=True):
    """The whole of it.

    Attributes:
        command: Repeats the experiment.
        asked: The experiment.
        job: The yardstick: metric, title, target, rising, samples.
        machine: What it ran on, versions included.
        curves: None of a row whose speed is withheld.
        commands: Label of a run to the commands that it consisted of.
        predictions: With `score`, `crossover` and `scaling`, what the model of cost says beside what was
            measured.
        verdict: Sentences.
    """

    version: int = VERSION
    command: str
    asked: Experiment = field(name="experiment")
    job: Job
    machine: dict[str, Any]
    noise: Noise = Noise()
    settings: list[Setting]
    gate: Gate
    rows: list[Entry]
    curves: list[Curve] = []
    bandwidth: list[Bandwidth] = []
    commands: dict[str, list[str]] = {}
    predictions: list[Prediction] = []
    score: Accuracy | None = None
    crossover: list[Crossover] = []
    scaling: list[Scaling] = []
    verdict: list[str] = []

    @property
    def experiment(self) -> dict[str, Any]:
        """The experiment as its file would have it, for people to copy."""
        values: dict[str, Any] = msgspec.to_builtins(self.asked, enc_hook=str)
        return values

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

    def setting(self, key: str) -> Setting:
        """The setting of that key.

        Raises:
            ConfigError: The results have none.
        """
        found = next((each for each in self.settings if each.key == key), None)
        if found is None:
            known = ", ".join(repr(each.key) for each in self.settings) or "none"
            raise ConfigError(f"the results have no setting {key!r}; they have {known}")
        return found

    @property
    def seeds(self) -> int:
        """The most seeds that any row was run with."""
        return max((len(each.seeds) for each in self.rows), default=0)
