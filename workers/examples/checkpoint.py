"""A script's own checkpoint: rank 0 writes one file, from which all ranks resume.

The file is a safetensors file: the tensors, and the structure around them as JSON in one more tensor. So
loading it cannot run code. Only rank 0 needs access to the file; it broadcasts the contents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import hubring

_AROUND = "around"


Parts = Mapping[str, Any]
"""A model, an optimizer, a scheduler, a scaler: by name, what has `state_dict` and `load_state_dict`."""


def save(path: Path | None, parts: Parts, epoch: int) -> None:
    """Writes the state of the parts after an epoch, on rank 0; does nothing without a path.

    The write is atomic: a reader sees the old file or the new file, never a part.
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
    """Loads the parts on all ranks from rank 0's file, and returns the next epoch.

    Without a path, or if rank 0 has no such file, returns 1 and changes nothing.
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
    """Returns the file's bytes for tensors, numbers, strings, None, and dicts, lists and tuples of them."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_take_apart(state, tensors))
    tensors[_AROUND] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


def unpacked(data: bytes) -> dict[str, Any]:
    """Returns the state that `packed` encoded."""
    tensors = safetensors.torch.load(data)
    around = json.loads(tensors.pop(_AROUND).numpy().tobytes())
    state: dict[str, Any] = _put_together(around, tensors)
    return state


def _take_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns JSON for a value, and moves its tensors to `tensors`; a name in front marks the type."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()
        return ["tensor", name]
    if isinstance(value, dict):  # keys can be numbers, as in an optimizer's state
        return ["dict", *([key, _take_apart(inner, tensors)] for key, inner in value.items())]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_take_apart(inner, tensors) for inner in value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}; expected tensors, numbers and strings"
    )


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
