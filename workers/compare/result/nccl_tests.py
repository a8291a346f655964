"""The terms of nccl-tests: its columns and its two bandwidths, as defined in its doc/PERFORMANCE.md."""

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
