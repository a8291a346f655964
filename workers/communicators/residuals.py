"""What compression has left out so far, by parameter: a part of a rank's state, whatever cuts the buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.types import Slice, TensorSpec
from hubring.ps.job.sharding import parameter_parts


class Residual(NamedTuple):
    """Elements of one parameter's residual, or of another tensor that an exchange carries to the next step.

    Attributes:
        name: The parameter's name, or that of the other tensor.
        numel: Its elements.
        place: Those that are here.
        values: They, flat, to read and to overwrite.
    """

    name: str
    numel: int
    place: slice
    values: Tensor


def residuals_in(
    flat: Tensor, offset: int, tensors: Sequence[TensorSpec], prefix: str = ""
) -> Iterator[Residual]:
    """Returns the parts of a flat residual that begins at an element of a bucket; none if it is empty."""
    piece = Slice(0, 0, offset, flat.numel(), 0)
    for part in parameter_parts(piece, tensors):
        tensor = tensors[part.position]
        yield Residual(f"{prefix}{tensor.name}", tensor.numel, part.in_parameter, flat[part.in_slice])


def read(residuals: Iterable[Residual]) -> dict[str, Tensor]:
    """Returns copies, whole, by name."""
    whole: dict[str, Tensor] = {}
    for name, numel, place, values in residuals:
        if name not in whole:
            whole[name] = torch.zeros(numel, dtype=values.dtype, device="cpu")
        whole[name][place] = values
    return whole


def write(residuals: Iterable[Residual], whole: Mapping[str, Tensor]) -> bool:
    """Overwrites what `read` returned, also from another cut. Returns False if something is not there."""
    complete = True
    for name, numel, place, values in residuals:
        if name in whole and whole[name].numel() == numel:
            values.copy_(whole[name][place])
        else:
            complete = False
    return complete
