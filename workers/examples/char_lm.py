"""Job `char-lm`: a recurrent network learns to write Python's documentation.

The text is `pydoc_data.topics`, which is part of Python: about 450,000 characters. The last tenth is the test
set, measured in bits per character.

The batch is shared as equally as possible, and each worker's loss counts by its number of lines. So any
number of workers trains the same model.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, TensorDataset

import hubring

LENGTH = 64
"""Number of characters in one sequence."""


def main(argv: list[str] | None = None) -> None:
    """Trains, and reports `loss` (nats) by step, `test_loss` and `bits_per_char` by epoch.

    Args:
        argv: The command line; None: the process's own.
    """
    options = _start(argv)
    train, test, characters = split()
    torch.manual_seed(options.seed)
    model = Writer(characters).to(hubring.device())
    inner = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer: hubring.DistributedOptimizer | hubring.LocalOptimizer
    if options.every:
        optimizer = hubring.LocalOptimizer(inner, model, every=options.every)
    else:
        optimizer = hubring.DistributedOptimizer(inner, model)
    rank, size = hubring.rank(), hubring.size()
    order = hubring.ShardedSampler(train, shuffle=True, seed=options.seed, rank=0, size=1)  # of all workers
    # The last, smaller batch is dropped: its lines would have a larger weight than the others.
    batches = BatchSampler(order, options.batch_size, drop_last=True)

    done, step = optimizer.completed_steps, 0  # done: steps of an earlier run, from the hub's checkpoint
    if done == 0:
        hubring.barrier("start")  # with an asynchronous hub the first worker would otherwise run ahead
    hubring.report(total_steps=options.epochs * len(batches))
    for epoch in range(options.epochs):
        if step >= done:
            _report(model, test, epoch, options.epochs)
        order.set_epoch(epoch)
        for batch in batches:
            step += 1
            if step <= done:
                continue
            (lines,) = train[batch[rank::size]]
            optimizer.zero_grad()
            loss = _loss(model, lines.to(hubring.device()))
            (loss * (len(lines) * size / len(batch))).backward()  # the mean over workers is that of the lines
            optimizer.step()
            hubring.report(loss=loss.item(), samples=len(lines))

    if isinstance(optimizer, hubring.LocalOptimizer):
        optimizer.merge()
    hubring.barrier("end")  # all workers have pushed their last gradients
    optimizer.refresh()  # so the parameters contain them, with an asynchronous hub too
    _report(model, test, options.epochs, options.epochs)


class Writer(nn.Module):
    """Predicts the next character from the previous ones: embedding, GRU, linear."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, characters)

    def forward(self, lines: Tensor) -> Tensor:
        """Returns scores [batch, length, characters] for int64 lines [batch, length]."""
        scores: Tensor = self.score(self.recur(self.embed(lines))[0])
        return scores


def split() -> tuple[TensorDataset, TensorDataset, int]:
    """Returns training and test lines, int64 [n, LENGTH + 1], and the number of distinct characters."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([number[character] for character in text])
    lines = numbers.unfold(0, LENGTH + 1, LENGTH)  # a line's last character is the first of the next
    cut = len(lines) * 9 // 10
    return TensorDataset(lines[:cut]), TensorDataset(lines[cut:]), len(number)


def _start(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options, once this worker has joined the job."""
    parser = argparse.ArgumentParser(prog="char-lm", description="Learn to write Python's documentation.")
    add = parser.add_argument
    add("--epochs", type=int, default=4, help="passes over the text [default: 4]")
    add("--batch-size", type=int, default=64, help="lines per step, over all workers [default: 64]")
    add("--lr", type=float, default=0.003, help="learning rate [default: 0.003]")
    add("--every", type=int, help="merge the workers after so many steps [default: average gradients]")
    add("--seed", type=int, default=0, help="seed of parameters and order [default: 0]")
    add("--threads", type=int, help="PyTorch's threads [default: this worker's cores]")
    options = parser.parse_args(argv)
    hubring.init()
    if options.threads:  # after init(), which sets each worker's share of the host's cores
        torch.set_num_threads(options.threads)
    if options.batch_size < hubring.size():
        parser.error(
            f"--batch-size {options.batch_size} is too small for {hubring.size()} workers: each needs a line;"
            f" use at least {hubring.size()}"
        )
    return options


def _report(model: nn.Module, test: TensorDataset, epoch: int, epochs: int) -> None:
    """Measures the model on the test lines, and reports the result, on rank 0."""
    if hubring.rank() != 0:
        return
    with torch.no_grad():
        loss = _loss(model, test.tensors[0].to(hubring.device())).item()
    bits = loss / math.log(2)
    hubring.report(epoch=epoch, test_loss=loss, bits_per_char=bits)
    print(f"epoch {epoch}/{epochs}  test loss {loss:.4f}  bits per character {bits:.3f}", file=sys.stderr)


def _loss(model: nn.Module, lines: Tensor) -> Tensor:
    return functional.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


if __name__ == "__main__":
    main()
