"""Content of `results.json`, version 3. `encode` writes it; tables and the page show what `decode` reads.

Every number belongs to a (setting, row) and covers all seeds. What was not measured is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
from msgspec import DecodeError, Struct, field
from msgspec.structs import astuple

from hubring.ps.core.errors import ConfigError, HubringError, UsageError
from hubring.workers.compare.plan.experiment import Experiment, JobMetric
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.run.timeline import HostClock
from hubring.workers.compare.statistics import MeasurementNoise, Number

VERSION = 3


class RowResult(Struct, frozen=True, kw_only=True):
    """One row in one setting.

    Attributes:
        setting: Key of the setting.
        row: Name of the row.
        about: What the row does, in one sentence.
        synchronous: Its workers complete each step together.
        exact: It must produce the same parameters as one process with the whole batch.
        emulated: Workers slept for part of every step.
        seeds: Seeds in the order of all values.
        withheld: Why no speed is shown; None: speeds are shown.
        disturbed: Which runs other programs disturbed, so that their speeds decide nothing; None: none.
        failed: How many runs did not finish and why; None: all finished.
        partly: All failed runs crashed, so the others count.
        numbers: By the names in `hubring.workers.compare.statistics`; None where no seed has a value.
            Speeds are also None if a run diverged: the remaining runs do not represent all.
        staleness: Number of pushes by staleness, over all seeds.
    """

    setting: str
    row: str
    about: str = ""
    synchronous: bool
    exact: bool = True
    emulated: bool = False
    seeds: list[int] = []
    withheld: str | None = None
    disturbed: str | None = None
    failed: str | None = None
    partly: bool = False
    numbers: dict[str, Number | None]
    staleness: dict[str, int] = {}

    def number(self, name: str) -> Number | None:
        """Returns the number with this name; None if it was not measured."""
        return self.numbers.get(name)

    def median(self, name: str) -> float | None:
        """Returns the median of `number`."""
        found = self.number(name)
        return None if found is None else found.median


class CurvePoint(Struct, frozen=True):
    """One point of a curve: seconds on rank 0's clock, and samples of all workers up to then."""

    seconds: float
    samples: float
    value: float


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """Returns at most `most` points, each the mean of neighbours."""
    size = -(-len(points) // most)
    parts = (points[start : start + size] for start in range(0, len(points), size or 1))
    return [CurvePoint(*map(fmean, zip(*map(astuple, part), strict=True))) for part in parts]


class RunCurve(Struct, frozen=True):
    """The curves of one run."""

    setting: str
    row: str
    seed: int
    loss: list[CurvePoint] = []
    metric: list[CurvePoint] = []


class Pair(Struct, frozen=True, kw_only=True):
    """A comparison of two runs. A difference that is not finite is text, because JSON has no such number.

    Attributes:
        setting: Key of the setting.
        seed: Seed of both runs.
        first: The reference row.
        second: The row that is judged.
        difference: Largest relative difference of any tensor.
        tensor: Name of that tensor, or what does not match.
        limit: Allowed difference; 0: all bits must be equal.
        wrong: Elements that exceed the limit; all elements of the first if the models do not match.
        steps: Steps after which they are compared; None: at the end.
        final: The difference at the end.
        turn: Number among the runs with this seed.
        passed: The difference is within the limit, or `advice` explains it.
        advice: Why the rows differ by right, and how to compare them; empty if they do not.
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
    advice: str = ""

    def __str__(self) -> str:
        allowed = f"at most {self.limit:g}" if self.limit else "no difference"
        turn = f", turn {self.turn}" if self.turn else ""
        found = f"{float(self.difference):.2g} in {self.tensor} (seed {self.seed}{turn})"
        elements = "1 element" if self.wrong == 1 else f"{self.wrong:,} elements"
        return f"{self.second} differs from {self.first} by {found}, {elements} in all; {allowed} is allowed"


class StepCheck(Struct, frozen=True, kw_only=True):
    """The steps of one run, each compared with torch's optimizer in one process.

    Attributes:
        setting: Key of the run's setting.
        row: Its row.
        seed: Its seed.
        turn: Its number among the runs with this seed.
        steps: Steps that it took; of an asynchronous row, those of all workers.
        judged: Steps whose update was compared.
        unjudged: Why the others were not, as a clause; empty if all were.
        fault: What is wrong, as a clause; empty if nothing is.
        step: The step of the fault; 0: none, or no single one.
        advice: What could not be judged, in a sentence; empty if nothing.
    """

    setting: str
    row: str
    seed: int
    turn: int = 0
    steps: int
    judged: int
    unjudged: str = ""
    fault: str = ""
    step: int = 0
    advice: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.fault

    def __str__(self) -> str:
        turn = f", turn {self.turn}" if self.turn else ""
        where = f"step {self.step} of {self.row}" if self.step else self.row
        return f"{where} is wrong (seed {self.seed}{turn}): {self.fault}"


class Gate(Struct, frozen=True):
    """Whether synchronous rows produced the same parameters, and every step was right."""

    passed: bool
    tolerance: float
    pairs: list[Pair] = []
    steps: list[StepCheck] = []

    @property
    def agree(self) -> bool:
        """Whether no pair differs, except by right."""
        return all(pair.passed for pair in self.pairs)

    @property
    def excused(self) -> int:
        """How many pairs differ by right."""
        return sum(bool(pair.advice) for pair in self.pairs)

    @property
    def judged(self) -> int:
        """Steps of all runs whose update was compared."""
        return sum(each.judged for each in self.steps)

    @property
    def taken(self) -> int:
        """Steps of all recorded runs."""
        return sum(each.steps for each in self.steps)

    @property
    def right(self) -> bool:
        """Whether no step is wrong."""
        return all(step.passed for step in self.steps)


class Prediction(Struct, frozen=True):
    """A predicted step time and the measured one."""

    setting: str
    row: str
    measured_ms: float | None
    predicted_ms: float | None
    error: float | None
    calibrated: bool = False
    by: str = "formula"


class Accuracy(Struct, frozen=True):
    """Mean relative error of predictions, without those that calibrated the model."""

    mean_error: float
    predictions: int = field(name="settings")


class Crossover(Struct, frozen=True):
    """The number of servers from which the hub beats the ring; None: no number does.

    Attributes:
        setting: The key, without servers.
        tried: The numbers of servers that were measured.
        measured: The smallest of them from which the hub wins with all that are decided.
        undecided: Those that are not decided, and with which it can begin to win earlier or not at all.
        predicted: By the calibrated model, if `calibrated`.
        calibrated: The model was calibrated.
        by_bytes: By the formula, which counts only bytes on links.
        formula: The formula as text.
    """

    setting: str
    tried: list[int] = []
    measured: float | None = None
    undecided: list[int] = []
    predicted: float | None = None
    calibrated: bool = False
    by_bytes: float | None = None
    formula: str = ""


class Scaling(Struct, frozen=True):
    """Samples a second of one row by number of workers."""

    row: str
    workers: list[int]
    measured: list[float | None]
    predicted: list[float | None]


class Bandwidth(Struct, frozen=True):
    """One line in the columns of nccl-tests; time in us, bandwidths in GB/s, `wrong` in elements.

    Times are None if the row is withheld; `wrong` is None if nothing was compared.
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
    """All results.

    Attributes:
        command: Command that repeats the experiment.
        asked: The experiment.
        job: Metric, title, target, rising, samples.
        machine: The machine of the runs, with versions.
        conditions: What the workers' steps were taken under, by name; several values of one with commas.
        curves: Without rows whose speed is withheld.
        commands: Commands of each run by label.
        scripts: SHA-256 of the user's script when each run started, by label; without runs of an earlier
            version, which did not record it.
        predictions: The cost model's predictions and the measurements; `score`, `crossover` and
            `scaling` belong to it.
        clocks: The hosts' clocks in the timelines, the worst of all runs; empty for one host.
        answer: The verdict in one sentence.
        verdict: All of it, in sentences.
    """

    version: int = VERSION
    command: str
    asked: Experiment = field(name="experiment")
    job: JobMetric
    machine: dict[str, Any]
    noise: MeasurementNoise = MeasurementNoise()
    conditions: dict[str, str] = {}
    settings: list[Setting]
    gate: Gate
    rows: list[RowResult]
    curves: list[RunCurve] = []
    bandwidth: list[Bandwidth] = []
    commands: dict[str, list[str]] = {}
    scripts: dict[str, str] = {}
    predictions: list[Prediction] = []
    score: Accuracy | None = None
    crossover: list[Crossover] = []
    scaling: list[Scaling] = []
    clocks: list[HostClock] = []
    answer: str = ""
    verdict: list[str] = []

    @property
    def experiment(self) -> dict[str, Any]:
        """The experiment in the form of its file, for people to copy."""
        values: dict[str, Any] = msgspec.to_builtins(self.asked, enc_hook=str)
        return values

    @property
    def row_names(self) -> list[str]:
        """All rows, in the order of their first occurrence."""
        named = [each.row for part in (self.rows, self.scaling, self.predictions) for each in part]
        return list(dict.fromkeys(named))

    @property
    def setting_keys(self) -> list[str]:
        """Keys of the settings with rows, in order."""
        return list(dict.fromkeys(each.setting for each in self.rows))

    def under(self, setting: str) -> list[RowResult]:
        """Returns the rows of a setting."""
        return [each for each in self.rows if each.setting == setting]

    def setting(self, key: str) -> Setting:
        """Returns the setting with that key.

        Raises:
            ConfigError: The results have no such setting.
        """
        found = next((each for each in self.settings if each.key == key), None)
        if found is None:
            known = ", ".join(repr(each.key) for each in self.settings) or "none"
            raise ConfigError(f"the results have no setting {key!r}; expected one of {known}")
        return found

    @property
    def seeds(self) -> int:
        """The largest number of seeds of any row."""
        return max((len(each.seeds) for each in self.rows), default=0)


class _Versioned(Struct):
    version: Any = None


def encode(findings: Findings) -> bytes:
    """Returns the findings as `results.json`.

    Raises:
        HubringError: A number is not finite. JSON would hold null for it, which means not measured.
    """
    _check_finite(msgspec.to_builtins(findings, enc_hook=str), "")
    return msgspec.json.format(msgspec.json.encode(findings, enc_hook=str), indent=1)


def decode(text: bytes) -> Findings:
    """Returns the content of `results.json`.

    Raises:
        ConfigError: The results have another version or an invalid value.
    """
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise ConfigError(
                f"results.json has version {version!r}; expected version {VERSION}. Read it with the release"
                " that wrote it, or run the experiment again"
            )
        return msgspec.json.decode(text, type=Findings, dec_hook=lambda kind, value: kind(value))
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
