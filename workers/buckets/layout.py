"""Assigns parameters to buckets, equally on all ranks and before any allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch.nn.parameter import is_lazy

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, TensorSpec

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


Kind = tuple[int, torch.dtype, torch.device]
"""Group, dtype and device, which are the same for all parameters of a bucket."""


class Layout(NamedTuple):
    """A planned bucket: its spec and the parameters in the spec's order."""

    spec: BucketSpec
    parameters: list[torch.nn.Parameter]


class Parts(Protocol):
    """A bucket or a planned bucket."""

    @property
    def spec(self) -> BucketSpec: ...

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]: ...


def kind_of(parts: Parts) -> Kind:
    """Returns a bucket's kind. Only buckets of one kind can be adjacent in memory."""
    return parts.spec.group, parts.parameters[0].dtype, parts.parameters[0].device


@dataclass(frozen=True, slots=True)
class _Trainable:
    """A parameter to put into a bucket; `position` counts in the order of backward."""

    position: int
    group: int
    name: str
    parameter: torch.nn.Parameter

    @property
    def kind(self) -> Kind:
        return self.group, self.parameter.dtype, self.parameter.device

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
) -> list[Layout]:
    """Assigns the optimizer's trainable parameters to buckets. See `make_buckets` for arguments and errors.

    Each parameter is assigned once, in reverse order of registration, which is the order of
    backward. A bucket has one group, dtype and device. Buckets are numbered in the order in
    which backward reaches their last parameter.
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
    return [
        Layout(_spec(index, run, optimizer_name), [one.parameter for one in run])
        for index, run in enumerate(_runs(trainables, bucket_bytes), first_index)
    ]


def _trainables(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> list[_Trainable]:
    """Returns the trainable parameters in reverse order of registration, each once."""
    groups = _group_of_each(optimizer)
    names = _default_names(optimizer) if named_parameters is None else dict(_unique(named_parameters))
    known = set(names.values())
    unknown = [_describe(parameter, groups) for parameter in groups if parameter not in known]
    if unknown:
        raise ConfigError(
            f"the optimizer has parameters that the model does not have: {', '.join(unknown)}; "
            "make the optimizer from the parameters of the same model"
        )
    chosen = [(name, parameter) for name, parameter in names.items() if parameter in groups]
    trainable = [(name, parameter) for name, parameter in chosen if _is_trainable(name, parameter)]
    return [
        _Trainable(position, groups[parameter], name, parameter)
        for position, (name, parameter) in enumerate(reversed(trainable))
    ]


def _group_of_each(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, int]:
    return {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def _default_names(optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    return {
        f"group{index}.{place}": parameter
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }


def _unique(named_parameters: NamedParameters) -> NamedParameters:
    """Drops further names of a tied parameter; raises ConfigError if two parameters have one name."""
    owner: dict[str, torch.nn.Parameter] = {}
    seen: set[torch.nn.Parameter] = set()
    for name, parameter in named_parameters:
        if owner.setdefault(name, parameter) is not parameter:
            raise ConfigError(f"two parameters are named {name!r}; give each parameter a unique name")
        if parameter not in seen:
            seen.add(parameter)
            yield name, parameter


def _describe(parameter: torch.nn.Parameter, groups: dict[torch.nn.Parameter, int]) -> str:
    group = groups[parameter]
    return f"one of shape {tuple(parameter.shape)} in param_groups[{group}]"


def _is_trainable(name: str, parameter: torch.nn.Parameter) -> bool:
    if is_lazy(parameter):
        raise ConfigError(
            f"parameter {name} has no shape yet; run one forward pass before you make DistributedOptimizer"
        )
    if not parameter.requires_grad or parameter.numel() == 0:
        return False
    if _dtype_name(parameter) not in DTYPE_BYTES:
        raise ConfigError(f"parameter {name} is {parameter.dtype}; use one of {', '.join(DTYPE_BYTES)}")
    return True


def _runs(trainables: list[_Trainable], bucket_bytes: int) -> list[list[_Trainable]]:
    """Splits trainables of one kind into runs of at most `bucket_bytes`, ordered by their last position."""
    runs: list[list[_Trainable]] = []
    newest: dict[Kind, list[_Trainable]] = {}
    filled: Counter[Kind] = Counter()
    for one in trainables:
        kind = one.kind
        if kind not in newest or filled[kind] + one.nbytes > bucket_bytes:
            newest[kind], filled[kind] = [], 0
            runs.append(newest[kind])
        newest[kind].append(one)
        filled[kind] += one.nbytes
    return sorted(runs, key=lambda run: run[-1].position)


def _spec(index: int, run: list[_Trainable], optimizer_name: str) -> BucketSpec:
    tensors = tuple(TensorSpec(one.name, tuple(one.parameter.shape)) for one in run)
    return BucketSpec(index, _dtype_name(run[0].parameter), run[0].group, optimizer_name, tensors)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_apart(trainables: list[_Trainable]) -> None:
    """Raises ConfigError if two elements share memory: the hub steps each one in memory of its own."""
    ends: list[tuple[int, int, str]] = []
    for one in trainables:
        if _is_expanded(one.parameter):
            raise ConfigError(
                f"elements of the parameter {one.name} share memory, because it was made with expand(), but"
                " the hub steps each one separately: make it with expand(...).clone()"
            )
        start = one.parameter.data_ptr()
        ends.append((start, start + one.nbytes, one.name))
    ends.sort()
    for (_, end, name), (start, _, other) in pairwise(ends):
        if start < end:
            raise ConfigError(
                f"the parameters {name} and {other} share memory, but the hub steps each one separately: tie"
                " them as one parameter (decoder.weight = encoder.weight), or start the workers with"
                " --aggregate"
            )
