"""Horovod's reduction constants."""

from __future__ import annotations

import warnings

from hubring.ps.core.messages import ReduceOp

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

OURS = {
    Average: ReduceOp.AVERAGE,
    Sum: ReduceOp.SUM,
    Adasum: ReduceOp.ADASUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}
NAMES = "hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product"


def chosen(op: int | None, average: bool | None) -> int:
    """Returns the reduction of `op`, or of the older `average`; Average if both are None.

    Raises:
        ValueError: Both are set, or `op` is unknown.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn("average= is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, 4)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in OURS:
        raise ValueError(f"op is {op!r}; expected one of {NAMES}")
    return op
