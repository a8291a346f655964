"""The bench's table, in the columns of nccl-tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from hubring.workers.compare.result.nccl_tests import algbw, busbw

HEAD = (
    f"{'row':<15}{'n':>3}{'shape':>14}{'size':>11}{'count':>10}{'type':>6}{'redop':>6}{'step':>5}"
    f"{'time':>9}{'min':>9}{'spread':>9}{'N':>6}{'algbw':>7}{'busbw':>7}{'#wrong':>8}\n"
    f"{'':<15}{'':>3}{'':>14}{'(B)':>11}{'(elements)':>10}{'':>6}{'':>6}{'':>5}"
    f"{'(ms)':>9}{'(ms)':>9}{'(ms)':>9}{'':>6}{'(GB/s)':>7}{'(GB/s)':>7}{'':>8}"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row's times of one step: average gradients, step the optimizer, everyone has the parameters.

    Attributes:
        row: Its name.
        n: How many ranks gave gradients.
        shape: Which model.
        optimizer: `sgd` (momentum 0.9) or `adam`.
        bytes: Size of the model.
        median_ms: Over all steps of all turns; a step is as slow as its slowest rank.
        min_ms: The fastest.
        spread_ms: From the fastest to the slowest.
        steps: How many there were.
        algbw: bytes / median, in 1e9 bytes a second.
        busbw: algbw x 2(n-1)/n, the bytes that each rank of a ring sends: as nccl-tests has it.
        wrong: Elements that were not torch's own, summed over ranks and turns. End to end: far from one
            process's; compressed: far from torch's own.
        shards: Of the hub; 0 where there is none.
        transport: To the hub; empty where there is none.
        codec: What gradients were compressed with; empty: nothing.
        bucket_bytes: What was handed over at once; 0: the row cuts slices, or nothing.
        threads: Of torch in each rank; servers and limits have one in every process.
        idle_cores: Cores that the row kept busy while others had their turn.
        samples_per_s: End to end: samples that all ranks together trained on in a second.
        exposed_ms: End to end: what the step took longer than computing alone.
        machine: What it ran on.
        date: When, ISO 8601.
        commit: Of the code that was measured; empty where git does not tell.
    """

    row: str
    n: int
    shape: str
    optimizer: str
    bytes: int
    median_ms: float
    min_ms: float
    spread_ms: float
    steps: int
    algbw: float
    busbw: float
    wrong: int
    shards: int = 0
    transport: str = ""
    codec: str = ""
    bucket_bytes: int = 0
    threads: int = 1
    idle_cores: float = 0.0
    samples_per_s: float = 0.0
    exposed_ms: float = 0.0
    machine: str = ""
    date: str = ""
    commit: str = ""

    def as_json(self) -> dict[str, Any]:
        """The entry as a JSON object, numbers to six digits."""
        return {name: _short(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        head = f"{self.row:<15}{self.n:>3}{self.shape:>14}"
        size = f"{self.bytes:>11}{self.bytes // 4:>10}{'float':>6}{'avg':>6}{self.optimizer:>5}"
        times = "".join(f"{_digits(each):>9}" for each in (self.median_ms, self.min_ms, self.spread_ms))
        bandwidth = f"{self.algbw:>7.2f}{self.busbw:>7.2f}"
        return f"{head}{size}{times}{self.steps:>6}{bandwidth}{self.wrong:>8}"


def entry(seconds: Sequence[float], *, n: int, nbytes: int, **rest: Any) -> Entry:
    """What the steps of one row came to.

    Args:
        seconds: Of every step that counts.
        n: How many ranks it had.
        nbytes: Size of the model.
        rest: The other fields of `Entry` that are not computed from these.
    """
    middle = median(seconds)
    return Entry(
        n=n,
        bytes=nbytes,
        median_ms=1e3 * middle,
        min_ms=1e3 * min(seconds),
        spread_ms=1e3 * (max(seconds) - min(seconds)),
        steps=len(seconds),
        algbw=algbw(nbytes, middle),
        busbw=busbw(nbytes, middle, n),
        **rest,
    )


def trained(entries: Sequence[Entry], samples: int) -> list[Entry]:
    """The same with what is told of whole training steps.

    Args:
        entries: All rows of one case.
        samples: Of one rank in one step.
    """
    alone = [each.median_ms for each in entries if each.row == "train-alone"]
    return [
        replace(
            each,
            samples_per_s=1e3 * samples * each.n / each.median_ms,
            exposed_ms=each.median_ms - alone[0] if alone else 0.0,
        )
        for each in entries
    ]


def _digits(milliseconds: float) -> str:
    """Three behind the point where it takes microseconds to tell two rows apart."""
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
