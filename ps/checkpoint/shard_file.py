"""A shard's file in a checkpoint: safetensors, with versions and clocks in its header."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hubring.ps.checkpoint.checkpoint_folder import FileEntry, described, digest, sync, unwritten, verify
from hubring.ps.core.errors import CheckpointCorrupt
from hubring.ps.store.key_state import KeyState, Snapshot

_VALUES = "values"


class _Counts(msgspec.Struct, frozen=True):
    """Version and clocks (by rank) of one key."""

    version: int
    clocks: dict[int, int]


def save(path: Path, snapshot: Snapshot) -> FileEntry:
    """Writes a shard's keys to a new file, flushes it to the disk, and returns its entry for the manifest.

    Raises:
        ConfigError: The disk is full, or the folder cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    counts: dict[int, _Counts] = {}
    for key, state in snapshot.items():
        tensors[f"{key}/{_VALUES}"] = state.values
        tensors.update({f"{key}/optimizer/{name}": tensor for name, tensor in state.optimizer.items()})
        counts[key] = _Counts(state.version, state.clocks)
    try:
        save_file(tensors, path, metadata={"counts": msgspec.json.encode(counts).decode()})
        sync(path)
        return FileEntry(path.name, digest(path), path.stat().st_size, tuple(sorted(snapshot)))
    except (OSError, SafetensorError) as error:
        raise unwritten(path, sum(tensor.nbytes for tensor in tensors.values()), error) from error


def load(folder: Path, keys: Collection[int]) -> Snapshot:
    """Reads some keys of a checkpoint, from all files that hold them.

    Raises:
        CheckpointCorrupt: A file is damaged, or no file holds one of the keys.
    """
    snapshot: Snapshot = {}
    for entry in described(folder).files:
        wanted = sorted(set(keys) & set(entry.keys))
        if wanted:
            verify(folder, entry)
            snapshot.update(_read(folder / entry.name, wanted))
    missing = sorted(set(keys) - snapshot.keys())
    if missing:
        raise CheckpointCorrupt(
            f"{folder} does not contain keys {missing[:5]}; another job wrote this checkpoint"
        )
    return snapshot


def _read(path: Path, keys: list[int]) -> Snapshot:
    try:
        with safe_open(path, "pt") as file:
            counts = msgspec.json.decode((file.metadata() or {})["counts"], type=dict[int, _Counts])
            names = list(file.keys())
            return {key: _state(file, names, key, counts[key]) for key in keys}
    except (OSError, KeyError, SafetensorError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"cannot read {path}: {error}") from error


def _state(file: Any, names: list[str], key: int, counts: _Counts) -> KeyState:
    prefix = f"{key}/optimizer/"
    own = [name for name in names if name.startswith(prefix)]
    optimizer = {name.removeprefix(prefix): file.get_tensor(name) for name in own}
    return KeyState(file.get_tensor(f"{key}/{_VALUES}"), optimizer, counts.version, counts.clocks)
