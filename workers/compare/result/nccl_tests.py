"""The words of nccl-tests: its columns and its two bandwidths, as its doc/PERFORMANCE.md defines them."""

from __future__ import annotations

COLUMNS = (
    "size (B)",
    "count (elements)",
    "type",
    "redop",
    "time (us)",
    "algbw (GB/s)",
    "busbw (GB/s)",
    "#wrong",
)


def algbw(nbytes: float, seconds: float) -> float:
    """Bytes of an operation by its time, in 1e9 bytes a second."""
    return nbytes / seconds / 1e9


def busbw(nbytes: float, seconds: float, n: int) -> float:
    """An allreduce's `algbw` x 2(n-1)/n: what each rank of a ring sends, and receives, in a second.

    A ring that uses its links well reaches their speed with it, whatever `n`. No link of a hub need carry
    that: a worker's carries the model once each way, which is `algbw`, and those of k servers n/k times as
    much. There it only says how fast the links of a ring would have to be for the same time.

    Args:
        nbytes: Of the tensor that is reduced.
        seconds: How long it took.
        n: Ranks; with one, nothing travels and it is 0.
    """
    return algbw(nbytes, seconds) * 2 * (n - 1) / n
