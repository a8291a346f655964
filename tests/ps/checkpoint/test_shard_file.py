from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hubring.ps.checkpoint import checkpoint_folder, shard_file
from hubring.ps.checkpoint.checkpoint_folder import FileEntry, Manifest
from hubring.ps.core.errors import CheckpointCorrupt
from hubring.ps.core.types import BucketSpec, Slice, TensorSpec
from hubring.ps.store.key_state import KeyState, Snapshot

BUCKET = BucketSpec(0, "float32", "SGD", (TensorSpec("bias", (2,)), TensorSpec("weight", (2, 2))))
SLICES = (Slice(0, 0, 0, 3, 0), Slice(1, 0, 3, 3, 1))


def state(key: int) -> KeyState:
    momentum = {"momentum_buffer": torch.full((3,), float(key)), "step": torch.tensor(4.0)}
    return KeyState(torch.arange(3.0) + 3 * key, momentum, version=4, clocks={0: 4, 2: 3})


def write(directory: Path) -> Path:
    folder = checkpoint_folder.begin(directory)
    files = []
    for key in (0, 1):
        path = folder / f"shard-{key}.safetensors"
        files.append(shard_file.save(path, {key: state(key)}))
    return checkpoint_folder.publish(folder, Manifest("job", "bsp", 4, 1, (BUCKET,), SLICES, tuple(files)))


def plain(snapshot: Snapshot) -> dict[int, object]:
    """What is comparable: floats as they are."""
    return {
        key: (
            {name: (each.dtype, each.tolist()) for name, each in tensors.items()},
            held.version,
            held.clocks,
        )
        for key, held in snapshot.items()
        for tensors in [{"": held.values, **held.optimizer}]
    }


def test_a_saved_shard_file_loads_bit_for_bit(tmp_path: Path) -> None:
    assert plain(shard_file.load(write(tmp_path), [0, 1])) == plain({0: state(0), 1: state(1)})


def test_a_shard_reads_the_files_that_hold_its_keys_and_no_others(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "shard-0.safetensors").write_bytes(b"torn")
    assert plain(shard_file.load(folder, [1])) == plain({1: state(1)})
    with pytest.raises(CheckpointCorrupt, match="has 4 bytes, expected"):
        shard_file.load(folder, [0, 1])


def test_a_key_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"does not contain keys \[7\]"):
        shard_file.load(write(tmp_path), [0, 7])


def test_a_file_that_is_no_safetensors_is_found_out(tmp_path: Path) -> None:
    folder = checkpoint_folder.begin(tmp_path)
    path = folder / "shard-0.safetensors"
    path.write_bytes(b"nonsense")
    entry = FileEntry(path.name, checkpoint_folder.digest(path), 8, (0,))
    published = checkpoint_folder.publish(folder, Manifest("job", "bsp", 4, 1, (BUCKET,), SLICES, (entry,)))
    with pytest.raises(CheckpointCorrupt, match="cannot read"):
        shard_file.load(published, [0])
