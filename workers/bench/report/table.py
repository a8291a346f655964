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
    """The times of a row for one step: average gradients, step the optimizer, return parameters to all ranks.

    Attributes:
        row: Name of the row.
        n: Number of ranks.
        shape: Name of the shape.
        optimizer: `sgd` (momentum 0.9) or `adam`.
        bytes: Size of the model.
        median_ms: Median of all steps of all turns; the time of a step is that of its slowest rank.
        min_ms: Time of the fastest step.
        spread_ms: Time of the slowest step minus that of the fastest.
        steps: Number of steps.
        algbw: bytes / median, in 1e9 bytes per second.
        busbw: algbw x 2(n-1)/n, the bytes that each rank of a ring sends, as in nccl-tests.
        wrong: Elements that differ from torch's own result, summed over ranks and turns. End to end: that are
            far from the result of one process; with compression: that are far from torch's result.
        shards: Shards of the hub; 0 without a hub.
        transport: Transport to the hub; empty without a hub.
        codec: Codec of the gradients; empty: no compression.
        bucket_bytes: Bucket size; 0 for a row without buckets of this size.
        threads: Threads of torch in each rank; each process of a server or a limit has one thread.
        idle_cores: Cores that the row used during the turns of other rows.
        samples_per_s: End to end: samples per second of all ranks together.
        exposed_ms: End to end: time of the step minus the time of a step without exchange.
        machine: Description of the machine.
        date: ISO 8601 date.
        commit: Commit of the measured code; empty without git.
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
        """Returns the entry as a JSON object, with numbers rounded to six digits."""
        return {name: _short(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        head = f"{self.row:<15}{self.n:>3}{self.shape:>14}"
        size = f"{self.bytes:>11}{self.bytes // 4:>10}{'float':>6}{'avg':>6}{self.optimizer:>5}"
        times = "".join(f"{_digits(each):>9}" for each in (self.median_ms, self.min_ms, self.spread_ms))
        bandwidth = f"{self.algbw:>7.2f}{self.busbw:>7.2f}"
        return f"{head}{size}{times}{self.steps:>6}{bandwidth}{self.wrong:>8}"


def entry(seconds: Sequence[float], *, n: int, nbytes: int, **rest: Any) -> Entry:
    """Returns the entry of one row.

    Args:
        seconds: Time of every step that counts.
        n: Number of ranks.
        nbytes: Size of the model.
        rest: The other fields of `Entry`.
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
    """Returns the entries with `samples_per_s` and `exposed_ms`.

    Args:
        entries: All rows of one case.
        samples: Samples of one rank in one step.
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
    """Formats with three decimals below 10 ms, where rows differ by microseconds."""
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
