"""Which elements of a parameter are recorded, of which part of it, and what recording costs."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable
from math import gcd, prod
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Method = TypeVar("Method", bound=Callable[..., Any])


def counted(method: Method) -> Method:
    """Adds the time of each call to the `seconds` of its object. Counted methods must not call each other."""

    @functools.wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += perf_counter() - began

    return cast("Method", timed)


def is_distributed(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether it is a DTensor of torch, whose module takes 0.5 s to import. Who made one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard(tensor: Tensor) -> tuple[int, int]:
    """Returns where this rank's part of a tensor begins in the flat tensor, and its number of elements.

    Torch divides a parameter along its first dimension. An ordinary tensor is a whole.
    """
    if not is_distributed(tensor):
        return 0, tensor.numel()
    mesh, (rows, *rest) = tensor.device_mesh, tensor.shape
    first = min(rows, -(-rows // mesh.size()) * mesh.get_local_rank())
    return first * prod(rest), tensor.to_local().numel()


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local().detach() if is_distributed(tensor) else tensor


MOST_OF_TENSOR = 64
"""Most elements of one parameter, unless it is larger than as many `APART`."""

MOST = 1024
"""Most elements of a model, unless it has so many parameters that each has `LEAST`, or large ones."""

LEAST = 2
"""Fewest elements of a parameter that has as many."""

APART = 1 << 20
"""Bytes of a large parameter for each of its elements, so that each slice of a few MiB has some."""

MOST_OF_LARGE = 4096
"""Most elements of a large parameter."""


class TensorSample(NamedTuple):
    """Elements of a flat tensor, evenly spread: `first`, `first + stride`, and so on."""

    first: int
    stride: int
    number: int

    @property
    def elements(self) -> range:
        """The elements' positions in the flat tensor."""
        return range(self.first, self.first + self.number * self.stride, self.stride)

    def within(self, first: int, number: int) -> tuple[slice, TensorSample]:
        """Returns which of the elements are in a part of the tensor, and the sample of that part.

        Args:
            first: Position of the part in the flat tensor.
            number: Its number of elements.
        """
        begin, end = (
            min(self.number, max(0, -((self.first - place) // self.stride)))
            for place in (first, first + number)
        )
        if begin == end:
            return slice(0, 0), TensorSample(0, 1, 0)
        return slice(begin, end), TensorSample(
            self.first + begin * self.stride - first, self.stride, end - begin
        )

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the elements of a tensor, flat: a view, unless the tensor is sparse or not contiguous."""
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        if not dense.is_contiguous():
            return dense.reshape(-1)[self.first :: self.stride][: self.number]
        return dense.as_strided((self.number,), (self.stride,), dense.storage_offset() + self.first)


class TappedParameter(NamedTuple):
    """One parameter.

    Attributes:
        name: Its name.
        values: The tensor that steps: the parameter, or this rank's part of it.
        source: The tensor of which autograd makes gradients: another if `values` is a part.
        sample: The elements that are recorded.
        places: Which of them this rank holds.
        held: These elements, within this rank's part.
        accumulator: Where autograd adds a gradient. Torch drops it, with our hooks, unless it is held.
    """

    name: str
    values: Tensor
    source: Tensor
    sample: TensorSample
    places: slice
    held: TensorSample
    accumulator: Any


def sample(name: str, numel: int, parameters: int, itemsize: int = 4) -> TensorSample:
    """Returns the elements of one parameter.

    Args:
        name: The parameter's name, which seeds the choice.
        numel: Its number of elements.
        parameters: How many parameters the model has.
        itemsize: Bytes of an element.
    """
    share = max(LEAST, min(MOST_OF_TENSOR, MOST // max(1, parameters)))
    number = min(numel, max(share, min(MOST_OF_LARGE, numel * itemsize // APART)))
    if number == 0:
        return TensorSample(0, 1, 0)
    stride = numel // number
    while gcd(stride, numel) > 1:  # else all elements could be of one column
        stride -= 1
    free = numel - (number - 1) * stride
    return TensorSample(zlib.crc32(name.encode()) % free, stride, number)
