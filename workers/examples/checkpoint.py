"""A script's own checkpoint: rank 0 keeps one file, from which all ranks go on.

The file is safetensors: the tensors as they are, and what is around them as JSON
in one more tensor, so that nothing in it can run. Only rank 0 needs the disk it
lies on; the others get what it reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

import hubring

_AROUND = "around"


class Part(Protocol):
    """A model, an optimizer, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


Parts = Mapping[str, Part]


def save(path: Path | None, parts: Parts, epoch: int) -> None:
    """Rank 0 writes how the parts are after an epoch; without a path nobody does.

    Whoever looks finds the file of before or the new one, never a part of it.
    """
    if path is None or hubring.rank() != 0:
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(packed({"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path | None, parts: Parts) -> int:
    """Brings the parts of all ranks to where rank 0's file has them; returns the epoch that comes next.

    Without a path, or where rank 0 has no such file, that is 1 and nothing changes.
    """
    if path is None:
        return 1
    data = path.read_bytes() if hubring.rank() == 0 and path.exists() else b""
    size = int(hubring.broadcast(torch.tensor(len(data)), name="checkpoint.size"))
    if size == 0:
        return 1
    whole = torch.frombuffer(bytearray(data or size), dtype=torch.uint8)
    state = unpacked(hubring.broadcast(whole, name="checkpoint").numpy().tobytes())
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["epoch"]) + 1


def packed(state: dict[str, Any]) -> bytes:
    """The file's bytes: of tensors, numbers, strings, None, and dicts, lists and tuples of them."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_take_apart(state, tensors))
    tensors[_AROUND] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


def unpacked(data: bytes) -> dict[str, Any]:
    """The state that was packed."""
    tensors = safetensors.torch.load(data)
    around = json.loads(tensors.pop(_AROUND).numpy().tobytes())
    state: dict[str, Any] = _put_together(around, tensors)
    return state


def _take_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value, its tensors apart; what JSON does not tell apart is told by a name before it."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()
        return ["tensor", name]
    if isinstance(value, dict):  # keys may be numbers, as in an optimizer's state
        return ["dict", *([key, _take_apart(inner, tensors)] for key, inner in value.items())]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_take_apart(inner, tensors) for inner in value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: give tensors, numbers and strings")


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *inner = value
    if kind == "tensor":
        return tensors[inner[0]]
    if kind == "dict":
        return {key: _put_together(part, tensors) for key, part in inner}
    parts = [_put_together(part, tensors) for part in inner]
    return tuple(parts) if kind == "tuple" else parts
