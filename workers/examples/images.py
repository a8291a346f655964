"""Handwritten digits for training and test: scikit-learn's, or MNIST from local files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hubring.ps.core.extras import require

IDX_OF_BYTES = 0x08
"""The element type in the idx header of MNIST's files."""


def images(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test images, normalized float32 [n, 1, height, width], with labels, int64 [n].

    Args:
        folder: Folder with MNIST's four files, gzipped or not: 60000 and 10000 images, 28 x 28. None: the
            digits of scikit-learn: 1437 and 360 images, 8 x 8.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is malformed.
        ConfigError: `folder` is None, and scikit-learn is not installed.
    """
    if folder is None:
        return _from_sklearn()
    train, test = (
        (read_idx(folder, f"{part}-images-idx3-ubyte", 3), read_idx(folder, f"{part}-labels-idx1-ubyte", 1))
        for part in ("train", "t10k")
    )
    mean, deviation = 0.1307 * 255, 0.3081 * 255
    return _dataset(*train, mean, deviation), _dataset(*test, mean, deviation)


def read_idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """Reads one of MNIST's files, gzipped or not: uint8 with the shape in its header.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has another element type, other dimensions, or a wrong size.
    """
    packed, plain = folder / f"{name}.gz", folder / name
    if not packed.is_file() and not plain.is_file():
        raise FileNotFoundError(f"{folder} has neither {name} nor {packed.name}; download MNIST's four files")
    data = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    header = 4 + 4 * dimensions
    if data[:4] != bytes((0, 0, IDX_OF_BYTES, dimensions)) or len(data) < header:
        raise ValueError(f"{folder / name}: expected an idx file of bytes with {dimensions} dimension(s)")
    shape = np.frombuffer(data, ">u4", dimensions, offset=4).astype(int).tolist()
    if len(data) - header != np.prod(shape):
        raise ValueError(
            f"{folder / name}: the header has shape {shape}, but the file holds {len(data) - header} bytes;"
            " copy the file again"
        )
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).view(shape)


def _from_sklearn() -> tuple[TensorDataset, TensorDataset]:
    require("sklearn", "the built-in digits")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    train, test = (_dataset(images[part], labels[part], mean=5, deviation=6) for part in parts)
    return train, test


def _dataset(images: Tensor, labels: Tensor, mean: float, deviation: float) -> TensorDataset:
    return TensorDataset((images.float().unsqueeze(1) - mean) / deviation, labels.long())
