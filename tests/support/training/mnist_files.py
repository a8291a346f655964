"""Small files in MNIST's format."""

from __future__ import annotations

from pathlib import Path

import torch


def idx(values: torch.Tensor) -> bytes:
    """Returns an idx file of bytes."""
    header = bytes((0, 0, 8, values.dim())) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + bytes(values.flatten().tolist())


def write_mnist(folder: Path, count: int) -> None:
    """Writes MNIST's four files with `count` random images of 8 x 8 in each part."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (count, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), dtype=torch.uint8, generator=generator)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(pictures))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
