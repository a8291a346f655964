"""Parameters and gradients laid out flat, in the order in which backward finishes.

A bucket's parameters are views of one flat tensor and their gradients views of
another, so that an exchange neither gathers nor scatters. The law: when a
bucket is handed over, every `parameter.grad` is its view of `bucket.gradients`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch.nn.parameter import is_lazy

from ps.errors import ConfigError
from ps.types import DTYPE_BYTES, BucketSpec, TensorSpec
from workers.staging import Allocate, mirror

logger = logging.getLogger(__name__)

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class Bucket:
    """A run of parameters of one group, dtype and device that are exchanged together.

    Attributes:
        spec: What all ranks and the hub agree on.
        parameters: The parameters, in the order of `spec.tensors`.
        gradients: Flat, on the parameters' device; every `parameter.grad` is a view of it.
        values: Flat, on the parameters' device; every `parameter.data` is a view of it.
    """

    def __init__(
        self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], allocate: Allocate
    ) -> None:
        self.spec = spec
        self.parameters = tuple(parameters)
        self.gradients = _flat_like(parameters[0], spec.numel, allocate)
        self.values = _flat_like(parameters[0], spec.numel, allocate)
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A parameter on its way into a bucket; position counts in the order of backward."""

    position: int
    group: int
    name: str
    parameter: torch.nn.Parameter

    @property
    def kind(self) -> tuple[int, torch.dtype, torch.device]:
        return self.group, self.parameter.dtype, self.parameter.device

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


def make_buckets(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    allocate: Allocate,
    bucket_bytes: int,
    optimizer_name: str,
) -> list[Bucket]:
    """Lays the optimizer's trainable parameters out in buckets and points them there.

    Args:
        optimizer: Its groups say which parameters belong together.
        named_parameters: The model's, in order of registration; None names them by group and place.
        allocate: Makes the flat tensors of parameters on the CPU, and the mirrors of others.
        bucket_bytes: Where a bucket is full; a larger parameter gets one of its own.
        optimizer_name: What the hub is to apply; empty where workers step.

    Raises:
        ConfigError: A parameter is unknown to the model, unnamed, uninitialised or of a dtype that
            does not travel; or nothing is trainable.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    entries = _entries(optimizer, named_parameters)
    if not entries:
        raise ConfigError("the optimizer holds no trainable parameter: nothing can be exchanged")
    _warn_of_layout(entries)
    with torch.no_grad():
        return [
            Bucket(_spec(index, run, optimizer_name), [entry.parameter for entry in run], allocate)
            for index, run in enumerate(_runs(entries, bucket_bytes))
        ]


def _entries(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> list[_Entry]:
    """The trainable parameters in reverse order of registration, each once."""
    groups = _group_of_each(optimizer)
    names = _default_names(optimizer) if named_parameters is None else dict(_unique(named_parameters))
    known = set(names.values())
    strangers = [_describe(parameter, groups) for parameter in groups if parameter not in known]
    if strangers:
        raise ConfigError(
            f"the optimizer holds parameters that the model does not: {', '.join(strangers)}; "
            "give both the same model"
        )
    chosen = [(name, parameter) for name, parameter in names.items() if parameter in groups]
    trainable = [(name, parameter) for name, parameter in chosen if _is_trainable(name, parameter)]
    return [
        _Entry(position, groups[parameter], name, parameter)
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
    """Drops the second name of a tied parameter; refuses one name for two."""
    owner: dict[str, torch.nn.Parameter] = {}
    seen: set[torch.nn.Parameter] = set()
    for name, parameter in named_parameters:
        if owner.setdefault(name, parameter) is not parameter:
            raise ConfigError(f"two parameters are named {name!r}; names must tell them apart")
        if parameter not in seen:
            seen.add(parameter)
            yield name, parameter


def _describe(parameter: torch.nn.Parameter, groups: dict[torch.nn.Parameter, int]) -> str:
    group = groups[parameter]
    return f"one of shape {tuple(parameter.shape)} in param_groups[{group}]"


def _is_trainable(name: str, parameter: torch.nn.Parameter) -> bool:
    if is_lazy(parameter):
        raise ConfigError(f"parameter {name} has no shape yet; run one forward pass first")
    if not parameter.requires_grad or parameter.numel() == 0:
        return False
    if _dtype_name(parameter) not in DTYPE_BYTES:
        raise ConfigError(f"parameter {name} is {parameter.dtype}; allowed: {', '.join(DTYPE_BYTES)}")
    return True


def _runs(entries: list[_Entry], bucket_bytes: int) -> list[list[_Entry]]:
    """Cuts entries of one kind into runs of at most `bucket_bytes`, ordered by when the last is ready."""
    runs: list[list[_Entry]] = []
    newest: dict[object, list[_Entry]] = {}
    for entry in entries:
        run = newest.get(entry.kind)
        if run is None or sum(member.nbytes for member in run) + entry.nbytes > bucket_bytes:
            run = newest[entry.kind] = []
            runs.append(run)
        run.append(entry)
    return sorted(runs, key=lambda run: run[-1].position)


def _spec(index: int, run: list[_Entry], optimizer_name: str) -> BucketSpec:
    tensors = tuple(TensorSpec(entry.name, tuple(entry.parameter.shape)) for entry in run)
    return BucketSpec(index, _dtype_name(run[0].parameter), run[0].group, optimizer_name, tensors)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _warn_of_layout(entries: list[_Entry]) -> None:
    """Shards and checkpoints know shapes, not strides, so every parameter becomes contiguous."""
    strided = [entry.name for entry in entries if not entry.parameter.is_contiguous()]
    if strided:
        logger.warning("made contiguous, a special memory format is lost: %s", ", ".join(strided))


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
