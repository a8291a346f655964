"""The bench's table, in the columns of nccl-tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from workers.bench.team import Turn

HEAD = (
    f"{'row':<10}{'n':>3}{'shape':>10}{'size':>12}{'count':>11}{'type':>7}{'redop':>6}"
    f"{'time':>9}{'min':>9}{'spread':>9}{'N':>4}{'algbw':>8}{'busbw':>8}{'#wrong':>8}\n"
    f"{'':<10}{'':>3}{'':>10}{'(B)':>12}{'(elements)':>11}{'':>7}{'':>6}"
    f"{'(ms)':>9}{'(ms)':>9}{'(ms)':>9}{'':>4}{'(GB/s)':>8}{'(GB/s)':>8}{'':>8}"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row's times of one step: average gradients, step SGD with momentum, everyone has the parameters.

    `spread_ms` is from the fastest step to the slowest, `steps` how many there were.
    Bandwidths, in 1e9 bytes a second, are nccl-tests': algbw = size / time, and busbw =
    algbw x 2(n-1)/n, the bytes that each rank of a ring sends.
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

    def as_json(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        size = f"{self.bytes:>12}{self.bytes // 4:>11}{'float':>7}{'avg':>6}"
        time = f"{self.median_ms:>9.2f}{self.min_ms:>9.2f}{self.spread_ms:>9.2f}{self.steps:>4}"
        bandwidth = f"{self.algbw:>8.2f}{self.busbw:>8.2f}"
        return f"{self.row:<10}{self.n:>3}{self.shape:>10}{size}{time}{bandwidth}{self.wrong:>8}"


def entry(row: str, n: int, shape: str, nbytes: int, turns: Sequence[Turn]) -> Entry:
    """What the turns of one row came to.

    Args:
        row: Its name.
        n: How many ranks it had.
        shape: How the model lay in buckets.
        nbytes: Size of the model.
        turns: Every turn that counts.
    """
    seconds = [each for turn in turns for each in turn.seconds]
    algbw = nbytes / median(seconds) / 1e9
    return Entry(
        row=row,
        n=n,
        shape=shape,
        optimizer="SGD(momentum=0.9)",
        bytes=nbytes,
        median_ms=1e3 * median(seconds),
        min_ms=1e3 * min(seconds),
        spread_ms=1e3 * (max(seconds) - min(seconds)),
        steps=len(seconds),
        algbw=algbw,
        busbw=algbw * 2 * (n - 1) / n,
        wrong=sum(turn.wrong for turn in turns),
    )
