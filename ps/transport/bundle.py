"""Tensors as payloads: the memory of one, or that of many one after another.

A contiguous tensor is never copied, unless it shares a payload with others.
Each of many begins at a multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

ALIGNMENT = 8
"""Bytes: what the widest dtype, and the scales and places of a coded payload, want."""

_CASTABLE = {torch.float32, torch.float64}
"""Dtypes that numpy, and a memoryview's cast, can read; the common ones, at a quarter of the price."""

with catch_warnings():
    # torch knows no read-only tensors and says so, once. Nobody writes to what a request or a reply brought.
    simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes; it lives as long as the view does."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach()
    if plain.dtype not in _CASTABLE:
        plain = plain.view(-1).view(torch.uint8)
    return plain.numpy().data.cast("B")


def size_of(sizes: Iterable[int]) -> int:
    """Bytes of a payload that holds tensors of so many each."""
    return int(_places(sizes)[-1].stop)


def bundle(tensors: Sequence[Tensor]) -> memoryview:
    """One payload of all; of one tensor its own memory."""
    if len(tensors) == 1:
        return bytes_of(tensors[0].contiguous())
    places = _places(tensor.nbytes for tensor in tensors)
    memory = torch.empty(places[-1].stop, dtype=torch.uint8)
    for place, tensor in zip(places, tensors, strict=False):
        memory[place] = tensor.detach().reshape(-1).view(torch.uint8)
    return bytes_of(memory)


def unbundle(payload: memoryview, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Tensors of these dtypes and shapes that share the payload's memory, which they fill."""
    places = _places(prod(shape) * dtype.itemsize for dtype, shape in kinds)
    return [
        elements(payload[place], dtype).view(shape)
        if place.stop > place.start
        else torch.empty(shape, dtype=dtype)
        for place, (dtype, shape) in zip(places, kinds, strict=False)
    ]


def _places(sizes: Iterable[int]) -> list[slice]:
    """Where each lies, and then an empty one at the end of all."""
    places, end = [], 0
    for size in sizes:
        start = ceil(end / ALIGNMENT) * ALIGNMENT
        end = start + size
        places.append(slice(start, end))
    return [*places, slice(end, end)]


def elements(payload: memoryview, dtype: torch.dtype, alignment: int = 1) -> Tensor:
    """The payload's memory as a flat tensor; copied only where it lies askew."""
    flat = torch.frombuffer(payload, dtype=dtype)
    if flat.data_ptr() % max(alignment, dtype.itemsize):
        return torch.frombuffer(payload, dtype=torch.uint8).clone().view(dtype)
    return flat
