"""The file of a checkpoint that workers write, and the state of an optimizer that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.checkpoint.checkpoint_folder import unwritten
from hubring.ps.core.errors import CheckpointCorrupt, ConfigError
from hubring.workers.optimizer.own_state import ModelRest


@runtime_checkable
class Trained(Protocol):
    """What a checkpoint needs from one optimizer and its model."""

    @property
    def completed_steps(self) -> int:
        """Completed steps."""

    @property
    def model_state(self) -> Mapping[str, Tensor]:
        """Parameters, buffers and frozen parameters by name, to read and to overwrite."""

    @property
    def named_parameters(self) -> Mapping[str, Tensor]:
        """The trained parameters by name."""

    @property
    def wrapped(self) -> Optimizer:
        """The local optimizer."""

    @property
    def rest(self) -> ModelRest:
        """The buffers, which differ by rank."""

    def settle(self) -> None:
        """Waits until the last step is complete."""


@dataclass(slots=True)
class Saved:
    """One optimizer's part of a checkpoint."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[int, dict[str, Any]]
    """The `state` of the optimizer's `state_dict`."""


def restore_state(trained: Trained, saved: Saved) -> None:
    """Gives an optimizer its saved state; it keeps its hyperparameters."""
    trained.wrapped.load_state_dict({**trained.wrapped.state_dict(), "state": saved.state})


def write_file(path: Path, all_trained: Sequence[Trained]) -> None:
    """Writes the state of all optimizers to one safetensors file.

    Tensors are named `INDEX/kept/NAME` (the model) and `INDEX/state/PARAMETER/NAME` (the optimizer's state),
    with one index per optimizer. Numbers of the state and the completed steps are in the metadata.

    Raises:
        ConfigError: An optimizer's state has a value that is neither a tensor nor a number; the disk is
            full; or the folder is not writable.
    """
    steps = [trained.completed_steps for trained in all_trained]
    tensors, numbers = _gather(all_trained)
    try:
        save_file(tensors, path, metadata={"steps": json.dumps(steps), "numbers": json.dumps(numbers)})
    except (OSError, SafetensorError) as error:
        raise unwritten(path, sum(tensor.nbytes for tensor in tensors.values()), error) from error


def read_file(path: Path) -> list[Saved]:
    """Returns the state of each optimizer, in their order.

    Raises:
        CheckpointCorrupt: The file is unreadable or is not a Hubring checkpoint.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            found = [Saved(step, {}, {}) for step in json.loads(metadata["steps"])]
            values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            values.update(json.loads(metadata["numbers"]))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}; use another --checkpoint-dir") from error
    for key, value in values.items():
        _put(found, key, value)
    return found


def describe_state(saved: Saved) -> bytes:
    """Returns what other ranks need to receive a state: dtypes and shapes of tensors, and all numbers."""
    kinds = [
        (parameter, name, _spell(value))
        for parameter, values in saved.state.items()
        for name, value in values.items()
    ]
    return json.dumps((saved.step, kinds)).encode()


def prepare_state(description: bytes) -> Saved:
    """Returns a state with empty tensors to receive into, from the output of `describe_state` on rank 0."""
    step, kinds = json.loads(description)
    state: dict[int, dict[str, Any]] = {}
    for parameter, name, spelt in kinds:
        made = spelt
        if isinstance(spelt, dict):
            made = torch.empty(spelt["shape"], dtype=getattr(torch, spelt["dtype"]), device="cpu")
        state.setdefault(parameter, {})[name] = made
    return Saved(step, {}, state)


def tensor_kind(tensor: Tensor | None) -> str:
    """Returns dtype and shape as text."""
    return "nothing" if tensor is None else f"{_dtype(tensor)}{list(tensor.shape)}"


def _gather(all_trained: Sequence[Trained]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, trained in enumerate(all_trained):
        tensors.update({f"{index}/kept/{name}": _own(tensor) for name, tensor in trained.model_state.items()})
        for parameter, values in trained.wrapped.state_dict()["state"].items():
            for name, value in values.items():
                key = f"{index}/state/{parameter}/{name}"
                if isinstance(value, Tensor):
                    tensors[key] = _own(value)
                else:
                    numbers[key] = _number(trained.wrapped, name, value)
    return tensors, numbers


def _put(found: list[Saved], key: str, value: Any) -> None:
    index, kind, rest = key.split("/", 2)
    saved = found[int(index)]
    if kind == "kept":
        saved.tensors[rest] = value
        return
    parameter, name = rest.split("/", 1)
    saved.state.setdefault(int(parameter), {})[name] = value


def _spell(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": _dtype(value), "shape": list(value.shape)}
    return value


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _own(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU. safetensors refuses tensors that share memory, and complex128."""
    if tensor.dtype == torch.complex128:
        raise ConfigError(
            "a checkpoint cannot store tensors of complex128: train in complex64, or remove --checkpoint-dir"
        )
    return tensor.detach().to("cpu", copy=True).contiguous()


def _number(optimizer: Optimizer, name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ConfigError(
        f"{type(optimizer).__name__} has a {type(value).__name__} as {name!r} in its state; a checkpoint can"
        " only store tensors and numbers: remove --checkpoint-dir, or use another optimizer"
    )
