"""What a checkpoint of workers that step themselves holds, and how it lies in a safetensors file.

Tensors lie there as `INDEX/kept/NAME` and `INDEX/state/PARAMETER/NAME`, one index an optimizer; what its
state holds besides, numbers alone, and the completed steps are in the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.checkpoint.checkpoint_folder import unwritten
from hubring.ps.core.errors import CheckpointCorrupt, ConfigError


class Trained(Protocol):
    """What a checkpoint asks of one optimizer and its model."""

    @property
    def completed_steps(self) -> int:
        """How many steps it has taken."""

    @property
    def model_state(self) -> Mapping[str, Tensor]:
        """Parameters, buffers and frozen parameters by name; to read and to overwrite."""

    @property
    def named_parameters(self) -> Mapping[str, Tensor]:
        """The trained ones of these."""

    @property
    def wrapped(self) -> Optimizer:
        """The optimizer that steps here."""


@dataclass(slots=True)
class Saved:
    """One optimizer's part of a checkpoint."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[int, dict[str, Any]]
    """As in the `state` of an optimizer's `state_dict`."""


def write(path: Path, all_trained: Sequence[Trained]) -> None:
    """Writes the state of each.

    Raises:
        ConfigError: An optimizer's state holds what is neither a tensor nor a number; or the disk is full,
            or the folder cannot be written.
    """
    steps = [trained.completed_steps for trained in all_trained]
    tensors, numbers = _gather(all_trained)
    try:
        save_file(tensors, path, metadata={"steps": json.dumps(steps), "numbers": json.dumps(numbers)})
    except (OSError, SafetensorError) as error:
        raise unwritten(path, sum(tensor.nbytes for tensor in tensors.values()), error) from error


def read(path: Path) -> list[Saved]:
    """The state of each, in their order.

    Raises:
        CheckpointCorrupt: The file is none of ours.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            found = [Saved(step, {}, {}) for step in json.loads(metadata["steps"])]
            values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            values.update(json.loads(metadata["numbers"]))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    for key, value in values.items():
        _put(found, key, value)
    return found


def described(saved: Saved) -> bytes:
    """What other ranks must know to receive a state: its tensors' kinds, and the numbers themselves."""
    kinds = [
        (parameter, name, _spell(value))
        for parameter, values in saved.state.items()
        for name, value in values.items()
    ]
    return json.dumps((saved.step, kinds)).encode()


def prepared(description: bytes) -> Saved:
    """A state with tensors to be overwritten, from `described` of another rank's."""
    step, kinds = json.loads(description)
    state: dict[int, dict[str, Any]] = {}
    for parameter, name, spelt in kinds:
        made = spelt
        if isinstance(spelt, dict):
            made = torch.empty(spelt["shape"], dtype=getattr(torch, spelt["dtype"]))
        state.setdefault(parameter, {})[name] = made
    return Saved(step, {}, state)


def kind(tensor: Tensor | None) -> str:
    """Dtype and shape in words."""
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
    """A copy that shares its memory with nothing, as safetensors wants it."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _number(optimizer: Optimizer, name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ConfigError(
        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {name!r} in its state, and checkpoints"
        " hold tensors and numbers alone: leave --checkpoint-dir out, or take another optimizer"
    )
