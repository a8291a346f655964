"""Job `char-lm`: a recurrent network learns to write Python's documentation.

The text is `pydoc_data.topics`, which comes with Python: about 450,000
characters. The last tenth is kept for the test, measured in bits per character.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hubring

LENGTH = 64
"""Characters that the network reads in one go."""


def main(argv: list[str] | None = None) -> None:
    """Trains, and reports `loss` (nats) by step, `test_loss` and `bits_per_char` by epoch.

    Args:
        argv: The command line; None: the process's own.
    """
    options, share = _start(argv)
    train, test, characters = split()
    torch.manual_seed(options.seed)
    model = Writer(characters).to(hubring.device())
    optimizer = hubring.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=options.lr), model)
    sampler = hubring.ShardedSampler(train, shuffle=True, seed=options.seed)
    # The uneven last batch is left out: cut into shares, its lines would weigh more than the others'.
    loader = DataLoader(train, batch_size=share, sampler=sampler, drop_last=True)

    done, step = optimizer.completed_steps, 0  # done: by an earlier run whose checkpoint the hub holds
    if done == 0:
        hubring.barrier("start")  # an asynchronous hub would let the first to come run ahead alone
    for epoch in range(options.epochs):
        if step >= done:
            _report(model, test, epoch, options.epochs)
        sampler.set_epoch(epoch)
        for (lines,) in loader:
            step += 1
            if step <= done:
                continue
            optimizer.zero_grad()
            loss = _loss(model, lines.to(hubring.device()))
            loss.backward()
            optimizer.step()
            hubring.report(loss=loss.item(), samples=len(lines))

    hubring.barrier("end")  # everyone's last gradient is in ...
    optimizer.refresh()  # ... and so it is in these parameters, on an asynchronous hub too
    _report(model, test, options.epochs, options.epochs)


class Writer(nn.Module):
    """Guesses the next character from those before it: embedding, GRU, linear."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, characters)

    def forward(self, lines: Tensor) -> Tensor:
        """Scores [batch, length, characters] for int64 lines [batch, length]."""
        scores: Tensor = self.score(self.recur(self.embed(lines))[0])
        return scores


def split() -> tuple[TensorDataset, TensorDataset, int]:
    """Lines to train and to test with, int64 [n, LENGTH + 1], and how many characters there are."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([number[character] for character in text])
    lines = numbers.unfold(0, LENGTH + 1, LENGTH)  # the last character of a line begins the next
    cut = len(lines) * 9 // 10
    return TensorDataset(lines[:cut]), TensorDataset(lines[cut:]), len(number)


def _start(argv: list[str] | None) -> tuple[argparse.Namespace, int]:
    """The options, and how many lines of a batch are this worker's."""
    parser = argparse.ArgumentParser(prog="char-lm", description="Learn to write Python's documentation.")
    parser.add_argument("--epochs", type=int, default=4, help="times through the text [4]")
    parser.add_argument("--batch-size", type=int, default=64, help="lines a step, over all workers [64]")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate [0.003]")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order [0]")
    parser.add_argument("--threads", type=int, help="of PyTorch in this process [its share of the cores]")
    options = parser.parse_args(argv)
    hubring.init()
    if options.threads:  # after init(), which gives every worker its share of the host's cores
        torch.set_num_threads(options.threads)
    share, rest = divmod(options.batch_size, hubring.size())
    if rest or not share:
        parser.error(f"--batch-size {options.batch_size} is not divisible by {hubring.size()} workers")
    return options, share


def _report(model: nn.Module, test: TensorDataset, epoch: int, epochs: int) -> None:
    """Rank 0 measures the model on the test lines and says how it goes."""
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
