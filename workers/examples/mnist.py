"""Learns handwritten digits like Horovod's MNIST example, with a hub, with a ring, or alone.

    ps-worker --server ADDR workers/examples/mnist.py [--data-dir MNIST] [--checkpoint FILE]

Every worker has its own batch, so N workers have an N times larger total batch. The learning rate warms up
to N times its value in the first epochs (Goyal et al., arXiv:1706.02677, 2017). Each worker tests a part of
the test images. The parts can differ in size, so the workers add sums and counts instead of averaging
averages.

Rank 0 writes a checkpoint, and the same command resumes from it. The checkpoint needs the optimizer's state
in the worker, hence `aggregate=True`.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import hubring
from hubring.ps.core.packages import require
from hubring.workers.examples import checkpoint, digits

IDX_OF_BYTES = 0x08
"""The element type in the idx header of MNIST's files."""


def main(argv: list[str] | None = None) -> None:
    """Trains; reports `loss`, `test_loss` and `test_accuracy`, of all workers, by epoch.

    Args:
        argv: The command line; None: the process's own.
    """
    options = _options(argv)
    hubring.init(aggregate=True)
    train, test = load_images(options.data_dir)
    model = network(options.seed).to(hubring.device())
    factor = hubring.size() if options.lr_scaling == "linear" else 1
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr * factor, momentum=0.9)
    optimizer = hubring.DistributedOptimizer(sgd, model)
    sampler = hubring.ShardedSampler(train, seed=options.seed)
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmth(step, factor, options.warmup_epochs * len(loader))
    )
    if factor > 1:
        _print(f"learning rate {options.lr:g} x {factor} workers, after {options.warmup_epochs} epoch(s)")
    parts: checkpoint.Parts = {"model": model, "optimizer": optimizer, "warm_up": warm_up}
    first = checkpoint.load(options.checkpoint, parts)
    for epoch in range(first, options.epochs + 1):
        sampler.set_epoch(epoch)
        loss = _train(model, optimizer, warm_up, loader)
        test_loss, accuracy = evaluate(model, test)
        hubring.report(epoch=epoch, loss=loss, test_loss=test_loss, test_accuracy=accuracy)
        _print(f"epoch {epoch}  loss {loss:.4f}  test loss {test_loss:.4f}  accuracy {accuracy:.4f}")
        checkpoint.save(options.checkpoint, parts, epoch)


def load_images(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
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
        require("sklearn", "the built-in digits")
        return digits.split(seed=0)
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


def _dataset(images: Tensor, labels: Tensor, mean: float, deviation: float) -> TensorDataset:
    return TensorDataset((images.float().unsqueeze(1) - mean) / deviation, labels.long())


def network(seed: int) -> nn.Module:
    """Returns the network of `digits`, for images of any size."""
    return digits.network(seed, pool=nn.AdaptiveMaxPool2d(4))


def warmth(step: int, factor: int, warm_up: float) -> float:
    """Returns a step's share of the scaled learning rate: from 1 / factor to 1 after `warm_up` steps."""
    done = min(1.0, step / warm_up) if warm_up else 1.0
    return (1 + (factor - 1) * done) / factor


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> tuple[float, float]:
    """Returns loss and accuracy over all test images; each image is tested by one worker."""
    mine = Subset(test, range(hubring.rank(), len(test), hubring.size()))
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for inputs, labels in DataLoader(mine, batch_size=256):
        scores = model(inputs.to(hubring.device())).cpu()
        right = (scores.argmax(dim=1) == labels).sum().item()
        loss = functional.cross_entropy(scores, labels, reduction="sum").item()
        sums += torch.tensor([loss, right, len(labels)], dtype=torch.float64)
    model.train()
    loss, right, count = hubring.allreduce(sums, hubring.ReduceOp.SUM, "test").tolist()
    return loss / count, right / count


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    warm_up: torch.optim.lr_scheduler.LRScheduler,
    loader: DataLoader[tuple[Tensor, ...]],
) -> float:
    """Trains for one epoch on this worker's part, and returns the mean loss over all workers' images."""
    sums = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs.to(hubring.device())), labels.to(hubring.device()))
        loss.backward()
        optimizer.step()
        warm_up.step()
        sums += torch.tensor([loss.item() * len(labels), len(labels)], dtype=torch.float64)
    total, count = hubring.allreduce(sums, hubring.ReduceOp.SUM, "train").tolist()
    return float(total / count)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mnist", description="Learn to read handwritten digits.")
    add = parser.add_argument
    add("--data-dir", type=Path, help="folder with MNIST's four idx files [default: scikit-learn's digits]")
    add("--epochs", type=int, default=10, help="passes over the images [default: 10]")
    add("--batch-size", type=int, default=32, help="images per step in each worker [default: 32]")
    add("--lr", type=float, default=0.02, help="learning rate of one worker [default: 0.02]")
    add(
        "--lr-scaling",
        choices=["linear", "none"],
        default="linear",
        help="how the learning rate grows with the number of workers [default: linear]",
    )
    add("--warmup-epochs", type=float, default=2, help="epochs to the full learning rate [default: 2]")
    add("--checkpoint", type=Path, help="file to write, and to resume from [default: none]")
    add("--seed", type=int, default=0, help="seed of parameters and order [default: 0]")
    return parser.parse_args(argv)


def _print(line: str) -> None:
    if hubring.rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
