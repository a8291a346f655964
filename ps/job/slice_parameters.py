"""Which parameters of a bucket have elements in a slice, and where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hubring.ps.core.types import Slice, TensorSpec


class ParameterPart(NamedTuple):
    """The elements of one parameter in one slice.

    Attributes:
        position: The parameter's position in the bucket's `tensors`.
        in_slice: Its elements, counted from the slice's start.
        in_parameter: The same elements, counted from the start of the flat parameter.
    """

    position: int
    in_slice: slice
    in_parameter: slice


def parameter_parts(piece: Slice, tensors: Sequence[TensorSpec]) -> tuple[ParameterPart, ...]:
    """Returns the parts of a slice in order. Parameters without elements in the slice have none.

    Args:
        piece: A slice of the bucket.
        tensors: All parameters of the bucket.
    """
    first, last = piece.offset, piece.offset + piece.numel
    starts = accumulate((tensor.numel for tensor in tensors), initial=0)
    parts = []
    for position, (tensor, start) in enumerate(zip(tensors, starts, strict=False)):
        begin, end = max(first, start), min(last, start + tensor.numel)
        if begin < end:
            in_slice, in_parameter = slice(begin - first, end - first), slice(begin - start, end - start)
            parts.append(ParameterPart(position, in_slice, in_parameter))
    return tuple(parts)
