"""What a job left in files: parameters of workers and of checkpoints, and the workers' trails."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hubring.ps.checkpoint import checkpoint_folder, shard_file
from hubring.ps.core.errors import CheckpointCorrupt
from tests.campaign.evidence import Look, State, Trail
from tests.campaign.tampering import flipped


def finals(folder: Path, names: list[str]) -> dict[str, State]:
    """Returns the final parameters of the workers that finished."""
    files = {name: folder / f"{name}.safetensors" for name in names}
    return {name: load_file(file) for name, file in files.items() if file.exists()}


def trails(folder: Path, names: list[str]) -> dict[str, Trail]:
    """Returns the steps of each worker that took one; a killed worker may have left half a line."""
    found = {}
    for name in names:
        file = folder / f"{name}.trail"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        steps = [json.loads(line) for line in lines if line.endswith("\n")]
        if steps:
            looks = (Look(one["step"], one["seconds"], tuple(one["seen"]), one["backward"]) for one in steps)
            found[name] = Trail(steps[0]["rank"], tuple(looks))
    return found


def progress(folder: Path, name: str) -> int:
    """Returns the number of steps of a worker."""
    trail = folder / f"{name}.trail"
    return trail.read_bytes().count(b"\n") if trail.exists() else 0


def checkpoint(saved: Path) -> tuple[State | None, int, int]:
    """Returns the parameters in a hub's newest checkpoint, its step and its rounds; None and -1 without."""
    try:
        newest = checkpoint_folder.newest(saved)
    except CheckpointCorrupt:
        newest = None
    if newest is None:
        return None, -1, -1
    folder, manifest = newest
    keys = shard_file.load(folder, [piece.key for piece in manifest.slices])
    state: dict[str, Tensor] = {}
    rounds = -1
    for bucket in manifest.buckets:
        flat = torch.zeros(bucket.numel)
        for piece in manifest.slices:
            if piece.bucket == bucket.index:
                flat[piece.offset : piece.offset + piece.numel] = keys[piece.key].values
                if bucket.tensors[0].name == "ledger" and piece.offset == 0:
                    rounds = keys[piece.key].version
        parts = flat.split([tensor.numel for tensor in bucket.tensors])
        state |= {
            tensor.name: part.view(tensor.shape) for tensor, part in zip(bucket.tensors, parts, strict=True)
        }
    return state, manifest.step, rounds


def checkpoints(saved: Path) -> list[Path]:
    """Returns the folders of a hub's checkpoints, the oldest first."""
    return sorted(saved.glob("[0-9]*-step-*"))


def damage(saved: Path, kind: str, draw: random.Random) -> Path | None:
    """Tears a file of the newest checkpoint, or flips a bit in it. Returns the file; None without one."""
    folders = checkpoints(saved)
    if not folders:
        return None
    file = draw.choice(sorted(folders[-1].iterdir()))
    content = file.read_bytes()
    torn = content[: draw.randrange(len(content))]
    file.write_bytes(torn if kind == "torn file" else flipped(content, draw.randrange(8 * len(content))))
    return file
