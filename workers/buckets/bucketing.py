"""Parameters and gradients laid out flat, in the order in which backward finishes.

A bucket's parameters are views of one flat tensor and their gradients views of
another, so that an exchange neither gathers nor scatters. The law: when a
bucket is handed over, every `parameter.grad` is its view of `bucket.gradients`.
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


class Bucket:
    """A run of parameters of one group, dtype and device that are exchanged together.

    Attributes:
        spec: What all ranks and the hub agree on.
        parameters: The parameters, in the order of `spec.tensors`.
        gradients: Flat, on the parameters' device; every `parameter.grad` is a view of its memory.
        values: Flat, on the parameters' device; every `parameter.data` is a view of it.
        gradient_views: What every `parameter.grad` is to be, in the order of `parameters`.
        stage: Its way between the parameters' device and the wire.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        gradients: torch.Tensor,
        values: torch.Tensor,
        staging: Staging,
    ) -> None:
        """Lays a bucket over flat tensors of `spec.numel` elements, which it keeps for life."""
        self.spec = spec
        self.parameters = tuple(parameters)
        self.gradients = gradients
        self.values = values
        self.staging = staging
        self.stage = staging.stage(gradients, values)
        # The same memory with a count of changes of its own: an exchange writes to `gradients`,
        # perhaps from another thread, and only what the script does is to be counted.
        self._counted = gradients.data
        self.gradient_views = _views(self._counted, self.parameters)
        self._value_views = _views(self.values, self.parameters)
        self._addresses = [view.data_ptr() for view in self._value_views]

    def take_in(self) -> None:
        """Moves the parameters and their gradients into the flat tensors."""
        for parameter, view in zip(self.parameters, self._value_views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.collect()

    @property
    def host_gradients(self) -> torch.Tensor:
        """The gradients in host memory: `gradients` itself on the CPU."""
        return self.stage.gradients

    @property
    def host_values(self) -> torch.Tensor:
        """The values in host memory: `values` itself on the CPU."""
        return self.stage.values

    @property
    def changes(self) -> int:
        """How often backward or the script has changed gradients in place; an exchange does not count."""
        return self._counted._version

    def collect(self) -> None:
        """Brings gradients that are elsewhere back into the flat tensor; a missing one counts as zeros."""
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
        """Zeroes the gradients and drops what was put in a view's place."""
        self._counted.zero_()
        if not self.holds_gradients():
            for parameter, view in zip(self.parameters, self.gradient_views, strict=True):
                parameter.grad = view

    def holds_gradients(self) -> bool:
        """Whether every gradient is where it belongs, so that nothing was put in its place."""
        return all(map(is_, [parameter.grad for parameter in self.parameters], self.gradient_views))

    @contextmanager
    def lent_gradients(self) -> Iterator[None]:
        """Every `grad` is its view for a while, even if the script has dropped it since."""
        kept = [parameter.grad for parameter in self.parameters]
        for parameter, view in zip(self.parameters, self.gradient_views, strict=True):
            parameter.grad = view
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient

    def check_values(self) -> None:
        """Refuses to go on where a parameter no longer lives in `values`.

        Raises:
            ConfigError: The model was moved or converted, so updates would miss it.
        """
        if [parameter.data_ptr() for parameter in self.parameters] == self._addresses:
            return
        for tensor, parameter, address in zip(
            self.spec.tensors, self.parameters, self._addresses, strict=True
        ):
            if parameter.data_ptr() != address:
                raise ConfigError(
                    f"parameter {tensor.name} was given other memory after DistributedOptimizer was made; "
                    "call model.to(...), .half() and the like before"
                )


def make_buckets(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    allocate: Allocate,
    bucket_bytes: int,
    optimizer_name: str,
    allocate_values: Allocate | None = None,
    *,
    adjacent: bool = False,
) -> list[Bucket]:
    """Lays the optimizer's trainable parameters out in buckets and points them there.

    Args:
        optimizer: Its groups say which parameters belong together.
        named_parameters: The model's, in order of registration; None names them by group and place.
        allocate: Makes the flat tensors of parameters on the CPU, and the mirrors of others.
        bucket_bytes: Where a bucket is full; a larger parameter gets one of its own.
        optimizer_name: What the hub is to apply; empty where workers step.
        allocate_values: The same as `allocate` for parameters on the CPU; None makes no difference.
        adjacent: Lays buckets of one group, dtype and device without gaps in one tensor, for `join`.

    Raises:
        ConfigError: A parameter is unknown to the model, unnamed, uninitialised or of a dtype that
            does not travel; or nothing is trainable.
    """
    layouts = lay_out(optimizer, named_parameters, bucket_bytes, optimizer_name)
    flat = _in_one_tensor if adjacent else _one_by_one
    gradients = flat(layouts, allocate)
    values = flat(layouts, allocate_values or allocate)
    places = zip(layouts, gradients, values, strict=True)
    staging = Staging(allocate)
    buckets = [Bucket(*layout, own, theirs, staging) for layout, own, theirs in places]
    with torch.no_grad():
        for bucket in buckets:
            bucket.take_in()
    return buckets


def join(buckets: Sequence[Bucket]) -> Bucket:
    """Buckets that lie side by side, as one over the same memory, for a single exchange.

    It bears the first one's index; the parameters' views stay those of `buckets`.
    """
    first = buckets[0]
    tensors = tuple(tensor for bucket in buckets for tensor in bucket.spec.tensors)
    spec = replace(first.spec, tensors=tensors)
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    gradients, values = (flat.as_strided((spec.numel,), (1,)) for flat in (first.gradients, first.values))
    return Bucket(spec, parameters, gradients, values, first.staging)


def _one_by_one(layouts: list[Layout], allocate: Allocate) -> list[torch.Tensor]:
    """A flat tensor for every bucket."""
    return [_flat_like(layout.parameters[0], layout.spec.numel, allocate) for layout in layouts]


def _in_one_tensor(layouts: list[Layout], allocate: Allocate) -> list[torch.Tensor]:
    """The same, cut from one tensor a kind."""
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
