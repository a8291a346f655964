"""The language model of Zaremba, Sutskever and Vinyals (arXiv:1409.2329, 2014) on the Penn Treebank.

    ps-worker --server ADDR workers/examples/lm_ptb.py --config small --data_path DIR

DIR holds ptb.train.txt, ptb.valid.txt and ptb.test.txt. `batch_size` is the total:
each of N processes trains on batch_size/N rows of the text and carries the state
of these from step to step. The law: N processes take the steps that one with all
rows takes, up to rounding. So the gradient's norm is clipped where the mean is
(`aggregate=True`), and what dropout leaves out is drawn for all rows alike.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import hubring
from hubring.workers.examples.ptb_corpus import NOTHING, PARTS, Rows, read, rows

LAYERS = 2
State = list[tuple[Tensor, Tensor]]
"""What each layer remembers, hidden and cell; float [1, rows, hidden] each."""


class Config(NamedTuple):
    """One of the paper's three models."""

    hidden: int
    steps: int
    """Words that gradients reach back."""
    dropout: float
    init_scale: float
    """Parameters begin between minus and plus this."""
    max_norm: float
    """Of the whole gradient."""
    decay: float
    """The learning rate, 1 at first, is multiplied by this ..."""
    decay_after: int
    """... in every epoch after this one."""
    epochs: int


CONFIGS = {
    "small": Config(200, 20, 0.0, 0.1, 5.0, 0.5, 4, 13),
    "medium": Config(650, 35, 0.5, 0.05, 5.0, 0.8, 6, 39),
    "large": Config(1500, 35, 0.65, 0.04, 10.0, 1 / 1.15, 14, 55),
}


def main(argv: list[str] | None = None) -> None:
    """Trains; reports `train_perplexity` and `valid_perplexity` by epoch, and `test_perplexity` at the end.

    Args:
        argv: The command line; None: the process's own.
    """
    options, mine = _start(argv)
    config, batch = CONFIGS[options.config], options.batch_size
    corpus = read(options.data_path)
    train = rows(corpus.train, batch, mine, whole=False)
    valid, test = (rows(stream, batch, mine, whole=True) for stream in (corpus.valid, corpus.test))
    if train.read.shape[1] < config.steps:
        few = f"ptb.train.txt has {len(corpus.train)} words"
        raise SystemExit(f"{few}: too few for --batch_size {batch} rows of {config.steps}")
    torch.manual_seed(options.seed)
    model = Model(corpus.words, config, mine, batch).to(hubring.device())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hubring.DistributedOptimizer(sgd, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: config.decay ** max(done + 1 - config.decay_after, 0)
    )
    for epoch in range(1, (options.epochs or config.epochs) + 1):
        _say(f"Epoch: {epoch} Learning rate: {schedule.get_last_lr()[0]:.3f}")
        _tell("train", _train(model, optimizer, train, config), epoch)
        _tell("valid", evaluate(model, valid, config.steps), epoch)
        schedule.step()
    _tell("test", evaluate(model, test, config.steps))


class Model(nn.Module):
    """Embedding, two layers of LSTM, and a score for each word; dropout between all of them.

    Args:
        words: How many there are.
        config: Its sizes.
        mine: Which rows of the batch are this worker's.
        batch: How many rows all workers have.
    """

    def __init__(self, words: int, config: Config, mine: slice, batch: int) -> None:
        super().__init__()
        self.hidden = config.hidden
        self.embed = nn.Embedding(words, config.hidden)
        self.layers = nn.ModuleList(
            nn.LSTM(config.hidden, config.hidden, batch_first=True) for _ in range(LAYERS)
        )
        self.score = nn.Linear(config.hidden, words)
        self.drop = SharedDropout(config.dropout, mine, batch)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -config.init_scale, config.init_scale)

    def begin(self, rows: int) -> State:
        """Remembers nothing yet."""
        zeros = torch.zeros(1, rows, self.hidden, device=self.score.weight.device)
        return [(zeros, zeros) for _ in self.layers]

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        """Scores [rows, steps, words] for int64 words [rows, steps], and what is remembered after them."""
        signal, after = self.drop(self.embed(words)), []
        for layer, before in zip(self.layers, state, strict=True):
            signal, (hidden, cell) = layer(signal, before)
            signal = self.drop(signal)
            after.append((hidden.detach(), cell.detach()))
        return self.score(signal), after


class SharedDropout(nn.Module):
    """Dropout that leaves out of N workers' rows what it would leave out of one's.

    Every worker draws for all rows, from generators that are alike, and keeps its own.
    """

    def __init__(self, rate: float, mine: slice, batch: int) -> None:
        super().__init__()
        self.rate, self.mine, self.batch = rate, mine, batch

    def forward(self, signal: Tensor) -> Tensor:
        """Any [rows, ...], of this worker's rows."""
        if not self.training or not self.rate:
            return signal
        kept = signal.new_empty(self.batch, *signal.shape[1:]).bernoulli_(1 - self.rate)[self.mine]
        return signal * kept / (1 - self.rate)


def windows(text: Rows, steps: int, *, whole: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Columns of the rows, `steps` at a time; what is left at the end only with `whole`."""
    length = text.read.shape[1]
    for start in range(0, length if whole else length - steps + 1, steps):
        columns = slice(start, start + steps)
        yield text.read[:, columns].to(hubring.device()), text.guess[:, columns].to(hubring.device())


@torch.no_grad()
def evaluate(model: Model, text: Rows, steps: int) -> float:
    """The perplexity over all workers' rows, every word counted once."""
    model.eval()
    state, sums = model.begin(len(text.read)), torch.zeros(2, dtype=torch.float64)
    for words, guess in windows(text, steps, whole=True):
        scores, state = model(words, state)
        sums += _counted(_loss(scores, guess), guess)
    return _perplexity(sums)


def _train(model: Model, optimizer: torch.optim.Optimizer, text: Rows, config: Config) -> float:
    """Trains once through the text; returns the perplexity on the way."""
    model.train()
    state, sums = model.begin(len(text.read)), torch.zeros(2, dtype=torch.float64)
    for words, guess in windows(text, config.steps, whole=False):
        optimizer.zero_grad()
        scores, state = model(words, state)
        loss = _loss(scores, guess)
        # Summed over the steps and averaged over the rows, of which all workers have equally many.
        (loss / len(words)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        sums += _counted(loss, guess)
    return _perplexity(sums)


def _loss(scores: Tensor, guess: Tensor) -> Tensor:
    return functional.cross_entropy(
        scores.flatten(0, 1), guess.flatten(), ignore_index=NOTHING, reduction="sum"
    )


def _counted(loss: Tensor, guess: Tensor) -> Tensor:
    return torch.tensor([loss.item(), (guess != NOTHING).sum().item()], dtype=torch.float64)


def _perplexity(sums: Tensor) -> float:
    """Of everybody's loss over everybody's words; a mean of the workers' means would weigh them wrong."""
    loss, words = hubring.allreduce(sums, hubring.ReduceOp.SUM, "perplexity").tolist()
    return math.exp(loss / words)


def _start(argv: list[str] | None) -> tuple[argparse.Namespace, slice]:
    """The options, and which rows of the batch are this worker's."""
    parser = argparse.ArgumentParser(prog="lm_ptb", description="Guess the next word of the Penn Treebank.")
    parser.add_argument("--config", choices=CONFIGS, default="small", help="size of the model [small]")
    parser.add_argument(
        "--data_path", "--data-path", type=Path, required=True, metavar="DIR", help="where ptb.*.txt are"
    )
    parser.add_argument(
        "--batch_size", "--batch-size", type=int, default=20, help="rows of text, over all workers [20]"
    )
    parser.add_argument("--epochs", type=int, help="times through the text [as the model's]")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and dropout [0]")
    options = parser.parse_args(argv)
    hubring.init(aggregate=True)  # the norm that is clipped is the mean gradient's
    share, rest = divmod(options.batch_size, hubring.size())
    if rest or share < 1:
        parser.error(f"--batch_size {options.batch_size} is not divisible by {hubring.size()} workers")
    missing = [name for name in map("ptb.{}.txt".format, PARTS) if not (options.data_path / name).is_file()]
    if missing:
        parser.error(f"--data_path {options.data_path} has no {', '.join(missing)}")
    first = hubring.rank() * share
    return options, slice(first, first + share)


def _tell(part: str, perplexity: float, epoch: int | None = None) -> None:
    hubring.report(**{f"{part}_perplexity": perplexity})
    _say(f"{'' if epoch is None else f'Epoch: {epoch} '}{part.capitalize()} Perplexity: {perplexity:.3f}")


def _say(line: str) -> None:
    if hubring.rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
