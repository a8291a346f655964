"""nccl-tests: its columns and its two bandwidths, and how to read the output of `all_reduce_perf`.

One text may hold the outputs of several runs, one after another. Prefixes of launchers, such as `0:` or
`[0]`, are ignored, and so are the in-place columns. Old versions have no column `root`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from statistics import median

from msgspec import Struct

from hubring.ps.core.errors import UsageError

NCCL_COLUMNS = (
    *("size (B)", "count (elements)", "type", "redop"),
    *("time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong"),
)


def algbw(nbytes: float, seconds: float) -> float:
    """Returns the bytes of an operation divided by its time, in 1e9 bytes per second."""
    return nbytes / seconds / 1e9


def busbw(nbytes: float, seconds: float, n: int) -> float:
    """Returns an allreduce's `algbw` x 2(n-1)/n: what each rank of a ring sends and receives in a second.

    A ring that uses its links well reaches their speed, whatever `n`. The links of a hub carry other
    amounts: a worker's link carries the model once each way, which is `algbw`; the links of k servers
    carry n/k times as much. For a hub, busbw is the link speed of a ring with the same time.

    Args:
        nbytes: Bytes of the reduced tensor.
        seconds: Time of the allreduce.
        n: Number of ranks; with one rank nothing is sent and the result is 0.
    """
    return algbw(nbytes, seconds) * 2 * (n - 1) / n


_BEGIN = re.compile(r"#\s*nThread\s")
_TEST = re.compile(r"Collective test starting:\s*(\w+?)(?:_mpi)?\s*$")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*\son\s+(\S+)\s+device\s")
_ROW = re.compile(
    r"(?:^|\s|\])(\d+)\s+(\d+)\s+(float|double|half|bfloat16|u?int\d+|fp8_\w+)\s+(\w+)\s+(?:-?\d+\s+)?"
    r"(\d+\.?\d*)\s+(\d+\.\d+)\s+(\d+\.\d+)\s"
)
_EXPECTED = "expected the output of nccl-tests' all_reduce_perf with its columns size, time and busbw"


class NcclSweep(Struct, frozen=True):
    """One run of `all_reduce_perf` over several sizes.

    Attributes:
        ranks: Number of ranks.
        nodes: Number of hosts; None: the output does not list its devices.
        rows: Bytes and seconds (out of place) by rising size; of repeated sizes the median.
    """

    ranks: int
    nodes: int | None
    rows: list[tuple[int, float]]


def read_nccl_output(text: str) -> list[NcclSweep]:
    """Returns the runs in the text.

    Raises:
        UsageError: The text has no row of `all_reduce_perf`, or another test's rows.
    """
    found = [sweep for part in _parts(text) if (sweep := _sweep(part)) is not None]
    if not found:
        raise UsageError(f"no row of sizes and times; {_EXPECTED}")
    return found


def _parts(text: str) -> Iterator[list[str]]:
    """Yields the lines of each run."""
    lines: list[str] = []
    rows = False
    for line in text.splitlines():
        if _BEGIN.search(line) and rows:
            yield lines
            lines, rows = [], False
        rows = rows or _ROW.search(f"{line} ") is not None
        lines.append(line)
    yield lines


def _sweep(lines: list[str]) -> NcclSweep | None:
    hosts: dict[int, str] = {}
    seconds: dict[int, list[float]] = {}
    ratios: list[tuple[int, float]] = []
    for line in lines:
        if (test := _TEST.search(line)) and test[1] != "all_reduce_perf":
            raise UsageError(f"the output of {test[1]}; {_EXPECTED}")
        if rank := _RANK.search(line):
            hosts[int(rank[1])] = rank[2]
        elif row := _ROW.search(f"{line} "):
            if row[4] == "none":
                raise UsageError(f"a row without a reduction: {line.strip()}; {_EXPECTED}")
            seconds.setdefault(int(row[1]), []).append(float(row[5]) / 1e6)
            if float(row[6]):
                ratios.append((int(row[1]), float(row[7]) / float(row[6])))
    rows = [(size, median(times)) for size, times in sorted(seconds.items()) if size]
    if not rows:
        return None
    if hosts:
        return NcclSweep(len(hosts), len(Counter(hosts.values())), rows)
    if not ratios:
        raise UsageError(f"neither ranks nor bandwidths; {_EXPECTED}")
    # busbw / algbw = 2 (n - 1) / n; the largest size has the most digits.
    ratio = min(max(ratios)[1], 1.9999)
    return NcclSweep(max(2, round(2 / (2 - ratio))), None, rows)
