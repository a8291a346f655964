"""Parameters and gradients laid out flat, in the order in which backward finishes.

A bucket's parameters are views of one flat tensor and their gradients views of
another, so that an exchange neither gathers nor scatters. The law: when a
bucket is handed over, every `parameter.grad` is its view of `bucket.gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch

from ps.errors import ConfigError
from ps.types import BucketSpec
from workers.layout import NamedParameters, lay_out
from workers.staging import Allocate, mirror


class Bucket:
    """A run of parameters of one group, dtype and device that are exchanged together.

    Attributes:
        spec: What all ranks and the hub agree on.
        parameters: The parameters, in the order of `spec.tensors`.
        gradients: Flat, on the parameters' device; every `parameter.grad` is a view of it.
        values: Flat, on the parameters' device; every `parameter.data` is a view of it.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        allocate: Allocate,
        allocate_values: Allocate,
    ) -> None:
        self.spec = spec
        self.parameters = tuple(parameters)
        self.gradients = _flat_like(parameters[0], spec.numel, allocate)
        self.values = _flat_like(parameters[0], spec.numel, allocate_values)
        self._staged_gradients = mirror(self.gradients, allocate)
        self._staged_values = mirror(self.values, allocate)
        self._gradient_views = _views(self.gradients, self.parameters)
        self._value_views = _views(self.values, self.parameters)
        for parameter, view in zip(self.parameters, self._value_views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.collect()

    @property
    def host_gradients(self) -> torch.Tensor:
        """The gradients in host memory: `gradients` itself on the CPU."""
        return self._staged_gradients.host

    @property
    def host_values(self) -> torch.Tensor:
        """The values in host memory: `values` itself on the CPU."""
        return self._staged_values.host

    def to_host(self) -> None:
        """Brings the gradients into `host_gradients`."""
        self._staged_gradients.download()

    def to_device(self, steps_on: Literal["server", "worker"] = "server") -> None:
        """Brings what an exchange left in host memory back: new values, or the workers' mean gradient."""
        if steps_on == "server":
            self._staged_values.upload()
        else:
            self._staged_gradients.upload()

    def settle(self) -> None:
        """Waits until `host_values` may be overwritten."""
        self._staged_values.settle()

    def collect(self) -> None:
        """Brings every gradient that is elsewhere, or missing, back into the flat tensor."""
        for position in range(len(self.parameters)):
            self.collect_one(position)

    def collect_one(self, position: int) -> None:
        """Makes one parameter's `grad` its view again; a missing gradient counts as zeros."""
        parameter, view = self.parameters[position], self._gradient_views[position]
        gradient = parameter.grad
        if gradient is view:
            return
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient.detach())
        parameter.grad = view

    def zero_gradients(self) -> None:
        """Zeroes the gradients and drops what was put in a view's place."""
        self.gradients.zero_()
        for parameter, view in zip(self.parameters, self._gradient_views, strict=True):
            parameter.grad = view

    def holds_gradients(self) -> bool:
        """Whether every gradient is where it belongs, so that nothing was put in its place."""
        pairs = zip(self.parameters, self._gradient_views, strict=True)
        return all(parameter.grad is view for parameter, view in pairs)

    def check_values(self) -> None:
        """Refuses to go on where a parameter no longer lives in `values`.

        Raises:
            ConfigError: The model was moved or converted, so updates would miss it.
        """
        for tensor, parameter, view in zip(
            self.spec.tensors, self.parameters, self._value_views, strict=True
        ):
            if parameter.data_ptr() != view.data_ptr():
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
) -> list[Bucket]:
    """Lays the optimizer's trainable parameters out in buckets and points them there.

    Args:
        optimizer: Its groups say which parameters belong together.
        named_parameters: The model's, in order of registration; None names them by group and place.
        allocate: Makes the flat tensors of parameters on the CPU, and the mirrors of others.
        bucket_bytes: Where a bucket is full; a larger parameter gets one of its own.
        optimizer_name: What the hub is to apply; empty where workers step.
        allocate_values: The same as `allocate` for parameters on the CPU; None makes no difference.

    Raises:
        ConfigError: A parameter is unknown to the model, unnamed, uninitialised or of a dtype that
            does not travel; or nothing is trainable.
    """
    layouts = lay_out(optimizer, named_parameters, bucket_bytes, optimizer_name)
    with torch.no_grad():
        return [
            Bucket(layout.spec, layout.parameters, allocate, allocate_values or allocate)
            for layout in layouts
        ]


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
