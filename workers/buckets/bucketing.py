"""Makes buckets: flat memory for parameters and gradients, in the order in which backward finishes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from hubring.workers.buckets.bucket import PARITIES, Bucket
from hubring.workers.buckets.layout import Kind, Layout, NamedParameters, Parts, kind_of, lay_out
from hubring.workers.buckets.pinning import Allocate
from hubring.workers.buckets.staging import Staging
from hubring.workers.buckets.value_memory import AllocateValues, OwnValues, ValueMemory


def make_buckets(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    allocate: Allocate,
    bucket_bytes: int,
    optimizer_name: str,
    allocate_values: AllocateValues | None = None,
    *,
    adjacent: bool = False,
    presence: bool = False,
    known: Collection[torch.nn.Parameter] = (),
    first_index: int = 0,
) -> list[Bucket]:
    """Puts the optimizer's trainable parameters into buckets.

    Where the hub steps, the parameters become views of `Bucket.values`. Where workers step, `values` has a
    copy of them, until `Bucket.hand_out`.

    Args:
        optimizer: A bucket has parameters of one of its groups.
        named_parameters: The model's parameters, in order of registration. None names parameters by
            group and position.
        allocate: Makes the flat tensors of parameters on the CPU, and host copies of other devices.
        bucket_bytes: Maximum size of a bucket. A larger parameter gets its own bucket.
        optimizer_name: The optimizer that the hub runs; empty where workers step.
        allocate_values: Makes the memory of the parameters where the hub steps. None uses `allocate` for
            those on the CPU.
        adjacent: Put gradients of buckets of one group, dtype and device into one tensor without gaps, for
            `join`.
        presence: Make room for `Bucket.presence`.
        known: Parameters to leave out, because other buckets have them.
        first_index: Index of the first bucket.

    Raises:
        ConfigError: `bucket_bytes` is not positive; a parameter is not in the model, has no unique
            name, is uninitialised or has an unsupported dtype; no parameter is trainable; or the hub steps
            and two parameters share memory.
    """
    layouts = lay_out(optimizer, named_parameters, bucket_bytes, optimizer_name, known, first_index)
    memories = _flat(layouts, allocate, adjacent=adjacent, presence=presence)
    values: list[ValueMemory]
    if optimizer_name and allocate_values is not None:
        values = [_values_like(layout, allocate_values) for layout in layouts]
    else:
        values = [OwnValues(own) for own in _flat(layouts, allocate if optimizer_name else _plain)]
    staging = Staging(allocate)
    places = zip(layouts, memories, values, strict=True)
    buckets = [Bucket(*layout, memory, theirs, staging) for layout, memory, theirs in places]
    with torch.no_grad():
        for bucket in buckets:
            if optimizer_name:
                bucket.move_in()
            else:
                bucket.copy_in()
    return buckets


def move_gradients(buckets: Sequence[Bucket], allocate: Allocate, *, adjacent: bool) -> None:
    """Gives buckets new memory for gradients, since the script holds views of the memory that they have."""
    presence = buckets[0].presence is not None
    memories = _flat(buckets, allocate, adjacent=adjacent, presence=presence)
    for bucket, memory in zip(buckets, memories, strict=True):
        bucket.use(memory)


def join(buckets: Sequence[Bucket]) -> Bucket:
    """Returns one bucket over the memory of adjacent buckets, for a single exchange.

    It has the first bucket's index. Only its `spec` and `memory` have a use: the parameters and their
    gradients belong to `buckets`.
    """
    first = buckets[0]
    tensors = tuple(tensor for bucket in buckets for tensor in bucket.spec.tensors)
    numel = sum(bucket.memory.numel() for bucket in buckets)
    memory = first.memory.as_strided((numel,), (1,))
    values = OwnValues(memory[:0])
    return Bucket(replace(first.spec, tensors=tensors), (), memory, values, first.staging)


def _flat(
    parts: Sequence[Parts], allocate: Allocate, *, adjacent: bool = False, presence: bool = False
) -> list[torch.Tensor]:
    """Makes a flat tensor for every bucket; `adjacent`: as parts of one tensor per kind."""
    sizes = [part.spec.numel + (len(part.parameters) + PARITIES) * presence for part in parts]
    if not adjacent:
        return [
            _flat_like(part.parameters[0], size, allocate) for part, size in zip(parts, sizes, strict=True)
        ]
    whole: Counter[Kind] = Counter()
    for part, size in zip(parts, sizes, strict=True):
        whole[kind_of(part)] += size
    rest: dict[Kind, torch.Tensor] = {}
    flats = []
    for part, size in zip(parts, sizes, strict=True):
        kind = kind_of(part)
        if kind not in rest:
            rest[kind] = _flat_like(part.parameters[0], whole[kind], allocate)
        flat, rest[kind] = rest[kind].tensor_split([size])
        flats.append(flat)
    return flats


def _values_like(layout: Layout, allocate_values: AllocateValues) -> ValueMemory:
    parameter = layout.parameters[0]
    return allocate_values(layout.spec.numel, parameter.dtype, parameter.device)


def _flat_like(parameter: torch.nn.Parameter, numel: int, allocate: Allocate) -> torch.Tensor:
    if parameter.device.type == "cpu":
        return allocate(numel, parameter.dtype)
    return torch.zeros(numel, dtype=parameter.dtype, device=parameter.device)


def _plain(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)
