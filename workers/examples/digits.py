"""Job `digits`: a small convolutional network learns to read handwritten digits.

scikit-learn contains 1797 images of 8x8 pixels; a fifth is the test set. The total batch size is fixed, and
every worker takes its share. So any number of workers trains the same model, with any topology.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import distribution

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hubring


def main(argv: list[str] | None = None) -> None:
    """Trains, and reports `loss` by step, `test_loss` and `test_accuracy` by epoch.

    Args:
        argv: The command line; None: the process's own.
    """
    options, share = _start(argv)
    train, test = split(options.seed)
    model = network(options.seed, options.hidden).to(hubring.device())
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hubring.DistributedOptimizer(sgd, model)
    sampler = hubring.ShardedSampler(train, shuffle=True, seed=options.seed)
    # The last, smaller batch is dropped: its images would have a larger weight than the others.
    loader = DataLoader(train, batch_size=share, sampler=sampler, drop_last=True)

    done, step = optimizer.completed_steps, 0  # done: steps of an earlier run, from the hub's checkpoint
    if done == 0:
        hubring.barrier("start")  # with an asynchronous hub the first worker would otherwise run ahead
    hubring.report(total_steps=options.epochs * len(loader))
    for epoch in range(options.epochs):
        if step >= done:
            _report(model, test, epoch, options.epochs)
        sampler.set_epoch(epoch)
        for images, labels in loader:
            step += 1
            if step <= done:
                continue
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(hubring.device())), labels.to(hubring.device()))
            loss.backward()
            optimizer.step()
            hubring.report(loss=loss.item(), samples=len(labels))

    hubring.barrier("end")  # all workers have pushed their last gradients
    optimizer.refresh()  # so the parameters contain them, with an asynchronous hub too
    _report(model, test, options.epochs, options.epochs)


def split(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns 1437 training and 360 test images: float32 [n, 1, 8, 8], normalized; labels int64 [n]."""
    # `load_digits()` reads this file too, but importing it takes longer than the training.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.from_numpy(numpy.loadtxt(str(file), delimiter=","))
    pixels, labels = table.split([64, 1], dim=1)
    images = (pixels.float().reshape(-1, 1, 8, 8) - 5) / 6  # from 0..16
    labels = labels.flatten().long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network(seed: int, hidden: int = 0, pool: nn.Module | None = None) -> nn.Module:
    """Returns a network of two convolutions and a linear layer with 9,930 parameters.

    Args:
        seed: Seed of the parameters.
        hidden: Units of an extra layer before the last; each adds 523 parameters. 0: no extra layer.
        pool: Makes images of 4 x 4; None: halves those of 8 x 8.
    """
    torch.manual_seed(seed)
    middle = [nn.Linear(32 * 4 * 4, hidden), nn.ReLU()] if hidden else []
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        pool or nn.MaxPool2d(2),
        nn.Flatten(),
        *middle,
        nn.Linear(hidden or 32 * 4 * 4, 10),
    )


def _start(argv: list[str] | None) -> tuple[argparse.Namespace, int]:
    """Returns the options, and this worker's number of images per batch."""
    parser = argparse.ArgumentParser(prog="digits", description="Learn to read handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=20, help="passes over the images [default: 20]")
    add("--batch-size", type=int, default=64, help="images per step, over all workers [default: 64]")
    add("--lr", type=float, default=0.01, help="learning rate [default: 0.01]")
    add("--hidden", type=int, default=0, help="units of an extra layer, for a larger model [default: 0]")
    add("--seed", type=int, default=0, help="seed of split, parameters and order [default: 0]")
    add("--threads", type=int, help="PyTorch's threads [default: this worker's cores]")
    options = parser.parse_args(argv)
    hubring.init()
    if options.threads:  # after init(), which sets each worker's share of the host's cores
        torch.set_num_threads(options.threads)
    share, rest = divmod(options.batch_size, hubring.size())
    if rest or not share:
        parser.error(f"--batch-size {options.batch_size} is not divisible by {hubring.size()} workers")
    return options, share


def _report(model: nn.Module, test: TensorDataset, epoch: int, epochs: int) -> None:
    """Measures the model on the test images, and reports the result, on rank 0."""
    if hubring.rank() != 0:
        return
    images, labels = (tensor.to(hubring.device()) for tensor in test.tensors)
    loss, accuracy = _evaluate(model, images, labels)
    hubring.report(epoch=epoch, test_loss=loss, test_accuracy=accuracy)
    print(f"epoch {epoch}/{epochs}  test loss {loss:.4f}  accuracy {accuracy:.3f}", file=sys.stderr)


@torch.no_grad()
def _evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    scores = model(images)
    loss = functional.cross_entropy(scores, labels).item()
    return loss, (scores.argmax(dim=1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
