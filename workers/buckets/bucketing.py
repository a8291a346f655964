"""Makes buckets: assigns parameters equally on all ranks, and makes flat memory for them and their gradients.

Parameters are in the order in which backward finishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from hubring.ps.core.errors import ConfigError, HubCannotStep
from hubring.ps.core.torch_internals import no_dense_tensor
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, TensorSpec
from hubring.workers.buckets.bucket import PARITIES, Bucket
from hubring.workers.buckets.staging import Allocate, Staging
from hubring.workers.buckets.value_memory import AllocateValues, OwnValues, ValueMemory

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


Kind = tuple[torch.dtype, torch.device]
"""Dtype and device, which are the same for all parameters of a bucket."""

MOST_GROUPS = 400
"""Groups of one bucket where the hub steps. A push has a limited header, which says how groups differ."""


class PlannedBucket(NamedTuple):
    """A planned bucket: its spec and the parameters in the spec's order."""

    spec: BucketSpec
    parameters: list[torch.nn.Parameter]


def kind_of(bucket: Bucket | PlannedBucket) -> Kind:
    """Returns a bucket's kind. Only buckets of one kind can be adjacent in memory."""
    return bucket.parameters[0].dtype, bucket.parameters[0].device


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
        optimizer: Has the parameters.
        named_parameters: The model's parameters, in order of registration. None names parameters by
            group and position.
        allocate: Makes the flat tensors of parameters on the CPU, and host copies of other devices.
        bucket_bytes: Maximum size of a bucket. A larger parameter gets its own bucket.
        optimizer_name: The optimizer that the hub runs; empty where workers step.
        allocate_values: Makes the memory of the parameters where the hub steps. None uses `allocate` for
            those on the CPU.
        adjacent: Put gradients of buckets of one dtype and device into one tensor without gaps, for `join`.
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
        values = [allocate_values(layout.spec.numel, *kind_of(layout)) for layout in layouts]
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
    parts: Sequence[Bucket | PlannedBucket],
    allocate: Allocate,
    *,
    adjacent: bool = False,
    presence: bool = False,
) -> list[torch.Tensor]:
    """Makes a flat tensor for every bucket; `adjacent`: as parts of one tensor per kind."""
    sizes = [part.spec.numel + _presences(part) * presence for part in parts]
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


def _presences(part: Bucket | PlannedBucket) -> int:
    """Returns the length of `Bucket.presence`; even, where the next bucket may have complex numbers."""
    count = len(part.parameters) + PARITIES
    return count + (count % 2) * part.parameters[0].is_complex()


def _flat_like(parameter: torch.nn.Parameter, numel: int, allocate: Allocate) -> torch.Tensor:
    dtype = parameter.dtype.to_real()
    if parameter.device.type == "cpu":
        return allocate(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=parameter.device)


def _plain(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class _Trainable:
    """A parameter to put into a bucket; `position` counts in the order of backward."""

    position: int
    group: int
    name: str
    parameter: torch.nn.Parameter

    @property
    def kind(self) -> Kind:
        return self.parameter.dtype, self.parameter.device

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


def lay_out(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    bucket_bytes: int,
    optimizer_name: str,
    known: Collection[torch.nn.Parameter] = (),
    first_index: int = 0,
) -> list[PlannedBucket]:
    """Assigns the optimizer's trainable parameters to buckets. See `make_buckets` for arguments and errors.

    Each parameter is assigned once, in reverse order of registration, which is the order of
    backward. A bucket has one dtype and device. Buckets are numbered in the order in which backward reaches
    their last parameter.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    trainables = [one for one in _trainables(optimizer, named_parameters) if one.parameter not in known]
    if not trainables:
        raise ConfigError(
            "the optimizer has no trainable parameter: pass it at least one parameter with requires_grad=True"
        )
    if optimizer_name:
        _check_apart(trainables)
    runs = _runs(trainables, bucket_bytes, MOST_GROUPS if optimizer_name else len(trainables))
    if optimizer_name:
        runs = list(map(_by_group, runs))
    return [
        PlannedBucket(_spec(index, run, optimizer_name), [one.parameter for one in run])
        for index, run in enumerate(runs, first_index)
    ]


def _trainables(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> list[_Trainable]:
    """Returns the trainable parameters in reverse order of registration, each once."""
    groups: dict[torch.nn.Parameter, int] = {}
    names: dict[str, torch.nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        groups.update(dict.fromkeys(group["params"], index))
        names.update((f"group{index}.{place}", parameter) for place, parameter in enumerate(group["params"]))
    if named_parameters is not None:
        names = dict(_unique(named_parameters))
    known = set(names.values())
    unknown = [
        f"one of shape {tuple(parameter.shape)} in param_groups[{group}]"
        for parameter, group in groups.items()
        if parameter not in known
    ]
    if unknown:
        raise ConfigError(
            f"the optimizer has parameters that the model does not have: {', '.join(unknown)}; "
            "make the optimizer from the parameters of the same model; if it steps others on purpose, such as"
            " float32 copies, pass DistributedOptimizer(optimizer, named_parameters=[(name, parameter), ...])"
            " instead of the model"
        )
    chosen = [(name, parameter) for name, parameter in names.items() if parameter in groups]
    trainable = [(name, parameter) for name, parameter in chosen if _is_trainable(name, parameter)]
    return [
        _Trainable(position, groups[parameter], name, parameter)
        for position, (name, parameter) in enumerate(reversed(trainable))
    ]


def _unique(named_parameters: NamedParameters) -> NamedParameters:
    """Drops further names of a tied parameter; raises ConfigError if two parameters have one name."""
    owner: dict[str, torch.nn.Parameter] = {}
    seen: set[torch.nn.Parameter] = set()
    for pair in named_parameters:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigError(
                f"named_parameters has a {type(pair).__name__}, not a pair of a name and a parameter: pass"
                " model.named_parameters(), or a list of such pairs"
            )
        name, parameter = pair
        if owner.setdefault(name, parameter) is not parameter:
            raise ConfigError(f"two parameters are named {name!r}; give each parameter a unique name")
        if parameter not in seen:
            seen.add(parameter)
            yield name, parameter


def _is_trainable(name: str, parameter: torch.nn.Parameter) -> bool:
    if is_lazy(parameter):
        raise ConfigError(
            f"parameter {name} has no shape yet; run one forward pass before you make DistributedOptimizer"
        )
    if not parameter.requires_grad:
        return False
    if kind := no_dense_tensor(parameter):
        whole = "leave out what shards it, as fully_shard does (deploy/SUPPORT.md)"
        fix = whole if kind == "a DTensor" else "make it one"
        raise ConfigError(
            f"parameter {name} is {kind}, and only dense tensors with values can be trained: {fix}, or freeze"
            " it with requires_grad_(False)"
        )
    if parameter.numel() == 0:
        return False
    if parameter.grad_dtype not in (None, parameter.dtype):
        raise ConfigError(
            f"parameter {name} is {parameter.dtype} and its grad_dtype is {parameter.grad_dtype}, but"
            " gradients are exchanged in the parameter's dtype: leave out grad_dtype"
        )
    if _dtype_name(parameter) not in DTYPE_BYTES:
        raise ConfigError(f"parameter {name} is {parameter.dtype}; use one of {', '.join(DTYPE_BYTES)}")
    return True


def _runs(trainables: list[_Trainable], bucket_bytes: int, most_groups: int) -> list[list[_Trainable]]:
    """Splits trainables of one kind into runs of at most `bucket_bytes`, ordered by their last position."""
    runs: list[list[_Trainable]] = []
    newest: dict[Kind, list[_Trainable]] = {}
    filled: Counter[Kind] = Counter()
    groups: dict[Kind, set[int]] = {}
    for one in trainables:
        kind = one.kind
        held = groups.setdefault(kind, set())
        many = len(held) >= most_groups and one.group not in held
        if kind not in newest or many or filled[kind] + one.nbytes > bucket_bytes:
            newest[kind], filled[kind], groups[kind] = [], 0, set()
            runs.append(newest[kind])
        newest[kind].append(one)
        filled[kind] += one.nbytes
        groups[kind].add(one.group)
    return sorted(runs, key=lambda run: run[-1].position)


def _by_group(run: list[_Trainable]) -> list[_Trainable]:
    """Puts the parameters of each group side by side: the hub steps what has equal options at once."""
    first: dict[int, int] = {}
    return sorted(run, key=lambda one: first.setdefault(one.group, one.position))


def _spec(index: int, run: list[_Trainable], optimizer_name: str) -> BucketSpec:
    pair = (2,) if run[0].parameter.is_complex() else ()
    tensors = tuple(TensorSpec(one.name, (*one.parameter.shape, *pair)) for one in run)
    return BucketSpec(index, _dtype_name(run[0].parameter), optimizer_name, tensors)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype.to_real()).removeprefix("torch.")


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_apart(trainables: list[_Trainable]) -> None:
    """Raises HubCannotStep if two elements share memory, or one is complex: the hub steps each on its own."""
    ends: list[tuple[int, int, str]] = []
    for one in trainables:
        if one.parameter.is_complex():
            raise HubCannotStep(f"the parameter {one.name} is complex, and the hub steps real numbers")
        if _is_expanded(one.parameter):
            raise HubCannotStep(
                f"elements of the parameter {one.name} share memory, because it was made with expand(), and"
                " the hub would step each one separately"
            )
        start = one.parameter.data_ptr()
        ends.append((start, start + one.nbytes, one.name))
    ends.sort()
    for (_, end, name), (start, _, other) in pairwise(ends):
        if start < end:
            raise HubCannotStep(
                f"the parameters {name} and {other} share memory, and the hub would step each one separately"
            )
