"""Tensors as payloads: one tensor's memory, or several tensors one after another.

A single contiguous tensor is never copied. Each of several tensors starts at a
multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

ALIGNMENT = 8
"""Bytes. The widest dtype needs it, as do the scales and indices of an encoded payload."""

_CASTABLE = {torch.float32, torch.float64}
"""Dtypes that numpy and memoryview.cast can read. These common dtypes take a quarter of the time."""

with catch_warnings():
    # torch has no read-only tensors and warns once. No code writes to the payload of a request or reply.
    simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor as bytes. The view keeps the memory alive."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach()
    if plain.dtype not in _CASTABLE:
        plain = plain.view(-1).view(torch.uint8)
    return plain.numpy().data.cast("B")


def size_of(sizes: Iterable[int]) -> int:
    """Returns the bytes of a payload that holds tensors of these sizes."""
    return int(_places(sizes)[-1].stop)


def bundle(tensors: Sequence[Tensor]) -> memoryview:
    """Returns one payload with all tensors. A single tensor is not copied if it is contiguous."""
    if len(tensors) == 1:
        return bytes_of(tensors[0].contiguous())
    places = _places(tensor.nbytes for tensor in tensors)
    memory = torch.empty(places[-1].stop, dtype=torch.uint8)
    for place, tensor in zip(places, tensors, strict=False):
        memory[place] = tensor.detach().reshape(-1).view(torch.uint8)
    return bytes_of(memory)


def unbundle(payload: memoryview, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Returns tensors of these dtypes and shapes that share the payload's memory. They must fill it."""
    places = _places(prod(shape) * dtype.itemsize for dtype, shape in kinds)
    return [
        elements(payload[place], dtype).view(shape)
        if place.stop > place.start
        else torch.empty(shape, dtype=dtype)
        for place, (dtype, shape) in zip(places, kinds, strict=False)
    ]


def _places(sizes: Iterable[int]) -> list[slice]:
    """Returns the slice of each tensor, then an empty slice at the end."""
    places, end = [], 0
    for size in sizes:
        start = ceil(end / ALIGNMENT) * ALIGNMENT
        end = start + size
        places.append(slice(start, end))
    return [*places, slice(end, end)]


def elements(payload: memoryview, dtype: torch.dtype, alignment: int = 1) -> Tensor:
    """Returns the payload's memory as a flat tensor. Copies only misaligned payloads."""
    flat = torch.frombuffer(payload, dtype=dtype)
    if flat.data_ptr() % max(alignment, dtype.itemsize):
        return torch.frombuffer(payload, dtype=torch.uint8).clone().view(dtype)
    return flat
