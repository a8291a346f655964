"""Flat buckets of parameters and gradients, in the order in which backward finishes.

A bucket's parameters are views of one flat tensor, and their gradients are views of
another, so an exchange copies nothing together or apart. Invariant: when a bucket is
sent, every `parameter.grad` is its view of `bucket.gradients`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from operator import is_

import torch

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec
from hubring.workers.buckets.layout import Kind, Layout, NamedParameters, kind_of, lay_out
from hubring.workers.buckets.pinning import Allocate
from hubring.workers.buckets.staging import Staging
from hubring.workers.buckets.value_memory import AllocateValues, OwnValues, ValueMemory


class Bucket:
    """Parameters of one group, dtype and device that are exchanged together.

    Attributes:
        spec: Names, shapes and dtype, which all ranks and the hub agree on.
        parameters: The parameters, in the order of `spec.tensors`.
        gradients: Flat, on the parameters' device; every `parameter.grad` is a view of its memory.
        values: Flat, on the parameters' device; every `parameter.data` is a view of it.
        landing: As `values`, but what the communicator writes to. Without the script's changes.
        gradient_views: The view for each `parameter.grad`, in the order of `parameters`.
        stage: Moves the bucket between the parameters' device and host memory.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        gradients: torch.Tensor,
        values: ValueMemory,
        staging: Staging,
    ) -> None:
        """Makes a bucket over flat memory of `spec.numel` elements each."""
        self.spec = spec
        self.parameters = tuple(parameters)
        self.gradients = gradients
        self.values = values.seen
        self.landing = values.landing
        self.staging = staging
        self.stage = staging.stage(gradients, values.landing, values.forget)
        self._memory = values
        # The same memory with a separate version counter: exchanges write to `gradients`, from any
        # thread, and `changes` must only count backward and the script.
        self._counted = gradients.data
        self.gradient_views = _views(self._counted, self.parameters)
        self._value_views = _views(self.values, self.parameters)
        self._addresses = [view.data_ptr() for view in self._value_views]
        self._ends = list(accumulate(view.nbytes for view in self._value_views))

    def move_in(self) -> None:
        """Moves the parameters and their gradients into the flat tensors."""
        # To where answers land, since a copy into `values` would count as the script's.
        for parameter, landing in zip(self.parameters, _views(self.landing, self.parameters), strict=True):
            landing.copy_(parameter.data)
        self._memory.forget()
        for parameter, view in zip(self.parameters, self._value_views, strict=True):
            parameter.data = view
        self.collect()

    def written(self) -> list[int]:
        """Returns the positions in `parameters` of those that the script changed since the last answer.

        Any write counts that changed a byte of `values`: through `.data`, NumPy, a kept view or native code.
        Empty where workers step, because nothing overwrites changes there. Ask before the bucket is sent.
        After its answer has landed, neighbors of a changed parameter count too; on a GPU, all parameters do.

        It takes microseconds where nothing changed. On a GPU it waits for the device.
        """
        return self._memory.written(self._ends)

    def forget_writes(self) -> None:
        """Drops the script's changes: `values` is what landed last. `stage.arrive` does the same."""
        self._memory.forget()

    @property
    def host_gradients(self) -> torch.Tensor:
        """The gradients in host memory: `gradients` itself on the CPU."""
        return self.stage.gradients

    @property
    def host_values(self) -> torch.Tensor:
        """The host memory in which new values land: `landing` itself on the CPU."""
        return self.stage.values

    @property
    def changes(self) -> int:
        """Number of in-place changes of gradients by backward or the script; exchanges do not count."""
        return self._counted._version

    def collect(self) -> None:
        """Copies gradients that are elsewhere into the flat tensor. A missing gradient counts as zeros."""
        if self.holds_gradients():
            return
        for parameter, view in zip(self.parameters, self.gradient_views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient.detach())
            parameter.grad = view

    def zero_gradients(self) -> None:
        """Zeroes the gradients and drops tensors that replaced a view."""
        self._counted.zero_()
        if not self.holds_gradients():
            for parameter, view in zip(self.parameters, self.gradient_views, strict=True):
                parameter.grad = view

    def holds_gradients(self) -> bool:
        """Whether every `parameter.grad` is its view."""
        return all(map(is_, [parameter.grad for parameter in self.parameters], self.gradient_views))

    @contextmanager
    def lent_gradients(self) -> Iterator[None]:
        """Sets every `parameter.grad` to its view inside the block, even if the script dropped it."""
        previous = [parameter.grad for parameter in self.parameters]
        for parameter, view in zip(self.parameters, self.gradient_views, strict=True):
            parameter.grad = view
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, previous, strict=True):
                parameter.grad = gradient

    def check_values(self) -> None:
        """Checks that every parameter is still a view of `values`.

        Raises:
            ConfigError: The model was moved or converted, so it would not get updates.
        """
        if [parameter.data_ptr() for parameter in self.parameters] == self._addresses:
            return
        for tensor, parameter, address in zip(
            self.spec.tensors, self.parameters, self._addresses, strict=True
        ):
            if parameter.data_ptr() != address:
                raise ConfigError(
                    f"parameter {tensor.name} was moved to other memory after DistributedOptimizer was made:"
                    " call model.to(...), .half() and similar methods before you make DistributedOptimizer"
                )


def make_buckets(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    allocate: Allocate,
    bucket_bytes: int,
    optimizer_name: str,
    allocate_values: AllocateValues | None = None,
    *,
    adjacent: bool = False,
) -> list[Bucket]:
    """Puts the optimizer's trainable parameters into buckets and makes them views.

    Args:
        optimizer: A bucket has parameters of one of its groups.
        named_parameters: The model's parameters, in order of registration. None names parameters by
            group and position.
        allocate: Makes the flat tensors of parameters on the CPU, and host copies of other devices.
        bucket_bytes: Maximum size of a bucket. A larger parameter gets its own bucket.
        optimizer_name: The optimizer that the hub runs; empty where workers step.
        allocate_values: Makes the memory of the parameters. None uses `allocate` for those on the CPU.
        adjacent: Put buckets of one group, dtype and device into one tensor without gaps, for `join`. The
            values too, made by `allocate`.

    Raises:
        ConfigError: `bucket_bytes` is not positive; a parameter is not in the model, has no unique
            name, is uninitialised or has an unsupported dtype; or no parameter is trainable.
    """
    layouts = lay_out(optimizer, named_parameters, bucket_bytes, optimizer_name)
    flat = _in_one_tensor if adjacent else _one_by_one
    gradients = flat(layouts, allocate)
    if adjacent or allocate_values is None:
        values: list[ValueMemory] = [OwnValues(own) for own in flat(layouts, allocate)]
    else:
        values = [_values_like(layout, allocate_values) for layout in layouts]
    places = zip(layouts, gradients, values, strict=True)
    staging = Staging(allocate)
    buckets = [Bucket(*layout, own, theirs, staging) for layout, own, theirs in places]
    with torch.no_grad():
        for bucket in buckets:
            bucket.move_in()
    return buckets


def join(buckets: Sequence[Bucket]) -> Bucket:
    """Returns one bucket over the memory of adjacent buckets, for a single exchange.

    It has the first bucket's index. `parameter.grad` and `parameter.data` stay views of `buckets`.
    """
    first = buckets[0]
    tensors = tuple(tensor for bucket in buckets for tensor in bucket.spec.tensors)
    spec = replace(first.spec, tensors=tensors)
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    gradients, values = (flat.as_strided((spec.numel,), (1,)) for flat in (first.gradients, first.values))
    return Bucket(spec, parameters, gradients, OwnValues(values), first.staging)


def _one_by_one(layouts: list[Layout], allocate: Allocate) -> list[torch.Tensor]:
    """Makes a flat tensor for every bucket."""
    return [_flat_like(layout.parameters[0], layout.spec.numel, allocate) for layout in layouts]


def _in_one_tensor(layouts: list[Layout], allocate: Allocate) -> list[torch.Tensor]:
    """Makes a flat tensor for every bucket as parts of one tensor per kind."""
    sizes: Counter[Kind] = Counter()
    for layout in layouts:
        sizes[kind_of(layout)] += layout.spec.numel
    rest: dict[Kind, torch.Tensor] = {}
    flats = []
    for layout in layouts:
        kind = kind_of(layout)
        if kind not in rest:
            rest[kind] = _flat_like(layout.parameters[0], sizes[kind], allocate)
        flat, rest[kind] = rest[kind].tensor_split([layout.spec.numel])
        flats.append(flat)
    return flats


def _values_like(layout: Layout, allocate_values: AllocateValues) -> ValueMemory:
    parameter = layout.parameters[0]
    return allocate_values(layout.spec.numel, parameter.dtype, parameter.device)


def _flat_like(parameter: torch.nn.Parameter, numel: int, allocate: Allocate) -> torch.Tensor:
    if parameter.device.type == "cpu":
        return allocate(numel, parameter.dtype)
    return torch.zeros(numel, dtype=parameter.dtype, device=parameter.device)


def _views(flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    ends = list(accumulate(parameter.numel() for parameter in parameters))
    return [
        flat[end - parameter.numel() : end].view(parameter.shape)
        for end, parameter in zip(ends, parameters, strict=True)
    ]
