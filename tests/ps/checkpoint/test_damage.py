"""Whatever bit of a checkpoint turns, the checkpoint before it is loaded."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import msgspec
import pytest
import torch

from hubring.ps.checkpoint import checkpoint_folder, shard_file
from hubring.ps.checkpoint.checkpoint_folder import UNSIGNED_FORMAT, FileEntry, Manifest
from hubring.ps.core.errors import CheckpointCorrupt
from hubring.ps.core.types import BucketSpec, Slice, TensorSpec
from hubring.ps.store.snapshot import KeyState

BUCKETS = (BucketSpec(0, "float32", 0, "SGD", (TensorSpec("weight", (2, 2)),)),)
SLICES = (Slice(0, 0, 0, 4, 0),)


def write(directory: Path, step: int) -> Path:
    folder = checkpoint_folder.begin(directory)
    path = folder / "shard-0.safetensors"
    written = shard_file.save(path, {0: KeyState(torch.arange(4.0) + step, {}, step, {0: step})})
    entry = FileEntry(path.name, written.sha256, written.bytes, (0,))
    return checkpoint_folder.publish(folder, Manifest("job", "bsp", step, 7, BUCKETS, SLICES, (entry,)))


def flip_bits(directory: Path, count: int) -> None:
    """Turns one bit at a time, and looks what is loaded."""
    before, newest = write(directory, 1), write(directory, 2)
    chance = random.Random(0)
    files = sorted(newest.iterdir())
    assert [file.name for file in files] == ["manifest.json", "manifest.sha256", "shard-0.safetensors"]
    for _ in range(count):
        file = chance.choice(files)
        content = file.read_bytes()
        changed = bytearray(content)
        if chance.random() < 0.9:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        else:
            del changed[chance.randrange(len(changed)) :]
        file.write_bytes(changed)
        found = checkpoint_folder.newest(directory)
        assert found is not None
        assert found[0] == before
        file.write_bytes(content)
    found = checkpoint_folder.newest(directory)
    assert found is not None
    assert found[0] == newest


def test_no_turned_bit_is_loaded(tmp_path: Path) -> None:
    flip_bits(tmp_path, 50)


@pytest.mark.slow
@pytest.mark.full
def test_no_turned_bit_is_loaded_in_many_tries(tmp_path: Path) -> None:
    flip_bits(tmp_path, 10_000)


def test_the_digest_of_the_manifest_is_one_that_sha256sum_reads(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert (folder / "manifest.sha256").read_text() == f"{digest}  manifest.json\n"


def older(folder: Path, number: int = UNSIGNED_FORMAT) -> None:
    """Makes a checkpoint of a format without a digest."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(msgspec.json.encode({**manifest, "format": number}))
    (folder / "manifest.sha256").unlink()


def test_a_checkpoint_from_before_the_digest_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    older(folder)
    assert checkpoint_folder.read(folder).step == 1


def test_a_digest_that_is_missing_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    (folder / "manifest.sha256").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"has format 2 without manifest\.sha256; expected format 1"):
        checkpoint_folder.read(folder)


def test_bytes_that_are_no_text_in_an_older_manifest_are_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    older(folder)
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text.replace(b"weight", b"we\xffght"))
    with pytest.raises(CheckpointCorrupt, match="cannot read"):
        checkpoint_folder.read(folder)
