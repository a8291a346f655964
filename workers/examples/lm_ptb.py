"""The language model of Zaremba, Sutskever and Vinyals (arXiv:1409.2329, 2014) on the Penn Treebank.

    ps-worker --server ADDR workers/examples/lm_ptb.py --config small --data_path DIR

DIR holds ptb.train.txt, ptb.valid.txt and ptb.test.txt. `batch_size` is the total: each of N processes
trains on batch_size/N rows of the text, and carries their state from step to step. Every word of the text
except the first is a target exactly once.

The rule: N processes take the same steps as one process with all rows, up to rounding. So each worker clips
the norm of the mean gradient (`aggregate=True`), and draws dropout for all rows.

Texar's `--config config_small` is `small`. With `--evaluate_on rank0` only rank 0 evaluates, as in Texar's
script. Otherwise all workers do, each its own rows. The perplexity is the same.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import hubring

PARTS = ("train", "valid", "test")
END, UNKNOWN = "<eos>", "<unk>"
NOTHING = -100
"""Marks a position without a target; cross_entropy ignores it."""
LAYERS = 2
State = list[tuple[Tensor, Tensor]]
"""Hidden and cell state of each layer; float [1, rows, hidden] each."""


class Corpus(NamedTuple):
    """Three streams of word numbers, int64. Numbers follow the word frequency in the first stream."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: int
    """Number of distinct words; the streams hold 0 to words - 1."""


class Rows(NamedTuple):
    """A stream in rows: input words, and the next word of each as target; int64 [rows, length]."""

    read: Tensor
    guess: Tensor


def read(folder: Path) -> Corpus:
    """Reads `ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt`; the end of a line is a word.

    A word that is not in the training text counts as `<unk>`.

    Raises:
        FileNotFoundError: A file is missing.
    """
    texts = [_words(folder / f"ptb.{part}.txt") for part in PARTS]
    counts = Counter(texts[0])
    counts[UNKNOWN] += 0  # the Penn Treebank contains it, other texts may not
    order = sorted(counts, key=lambda word: (-counts[word], word))
    number = {word: index for index, word in enumerate(order)}
    unknown = number[UNKNOWN]
    train, valid, test = (torch.tensor([number.get(word, unknown) for word in text]) for text in texts)
    return Corpus(train, valid, test, len(number))


def rows(stream: Tensor, batch: int, mine: slice, *, whole: bool) -> Rows:
    """Divides a stream into `batch` consecutive rows, and returns this worker's rows.

    Args:
        stream: int64 [n].
        batch: Number of rows.
        mine: This worker's rows.
        whole: Whether to include the words that do not fill a column, padded without targets; otherwise they
            are dropped.
    """
    pairs = len(stream) - 1
    length = -(-pairs // batch) if whole else pairs // batch
    read, guess = torch.zeros(batch * length, dtype=torch.int64), torch.full((batch * length,), NOTHING)
    used = min(pairs, batch * length)
    read[:used], guess[:used] = stream[:used], stream[1 : used + 1]
    return Rows(read.view(batch, length)[mine], guess.view(batch, length)[mine])


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").replace("\n", f" {END} ").split()


class Config(NamedTuple):
    """One of the paper's three models."""

    hidden: int
    steps: int
    """Number of words over which gradients propagate back."""
    dropout: float
    init_scale: float
    """Initial parameters are uniform between minus and plus this value."""
    max_norm: float
    """Maximum norm of the whole gradient."""
    decay: float
    """Factor of the learning rate, which starts at 1, in every epoch after `decay_after`."""
    decay_after: int
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
    alone = options.evaluate_on == "rank0"
    evaluates = not alone or hubring.rank() == 0
    seen = slice(None) if alone else mine
    valid, test = (rows(stream, batch, seen, whole=True) for stream in (corpus.valid, corpus.test))
    if train.read.shape[1] < config.steps:
        few = f"ptb.train.txt has {len(corpus.train)} words"
        raise SystemExit(f"{few}, too few for --batch_size {batch} rows of {config.steps} words")
    torch.manual_seed(options.seed)
    model = Model(corpus.words, config, mine, batch).to(hubring.device())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hubring.DistributedOptimizer(sgd, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: config.decay ** max(done + 1 - config.decay_after, 0)
    )
    for epoch in range(1, (options.epochs or config.epochs) + 1):
        _print(f"Epoch: {epoch} Learning rate: {schedule.get_last_lr()[0]:.3f}")
        _report("train", _train(model, optimizer, train, config), epoch)
        if evaluates:
            _report("valid", evaluate(model, valid, config.steps, alone=alone), epoch)
        schedule.step()
    if evaluates:
        _report("test", evaluate(model, test, config.steps, alone=alone))


class Model(nn.Module):
    """Embedding, two LSTM layers, and a score for each word, with dropout between all layers.

    Args:
        words: Number of distinct words.
        config: The configuration.
        mine: This worker's rows of the batch.
        batch: Number of rows of all workers.
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
        """Returns the initial state."""
        zeros = torch.zeros(1, rows, self.hidden, device=self.score.weight.device)
        return [(zeros, zeros) for _ in self.layers]

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        """Returns scores [rows, steps, words] for int64 words [rows, steps], and the state after them."""
        signal, after = self.drop(self.embed(words)), []
        for layer, before in zip(self.layers, state, strict=True):
            signal, (hidden, cell) = layer(signal, before)
            signal = self.drop(signal)
            after.append((hidden.detach(), cell.detach()))
        return self.score(signal), after


class SharedDropout(nn.Module):
    """Dropout with the same mask for N workers as for one.

    Every worker draws the mask of all rows with the same generator state, and uses its own rows.
    """

    def __init__(self, rate: float, mine: slice, batch: int) -> None:
        super().__init__()
        self.rate, self.mine, self.batch = rate, mine, batch

    def forward(self, signal: Tensor) -> Tensor:
        """Applies dropout to this worker's rows, [rows, ...]."""
        if not self.training or not self.rate:
            return signal
        mask = signal.new_empty(self.batch, *signal.shape[1:]).bernoulli_(1 - self.rate)[self.mine]
        return signal * mask / (1 - self.rate)


def windows(text: Rows, steps: int, *, whole: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields columns of the rows, `steps` at a time; with `whole` also a shorter rest at the end."""
    length = text.read.shape[1]
    for start in range(0, length if whole else length - steps + 1, steps):
        columns = slice(start, start + steps)
        yield text.read[:, columns].to(hubring.device()), text.guess[:, columns].to(hubring.device())


@torch.no_grad()
def evaluate(model: Model, text: Rows, steps: int, *, alone: bool) -> float:
    """Returns the perplexity over the rows of all workers; `alone`: over the rows of this one."""
    model.eval()
    state, sums = model.begin(len(text.read)), torch.zeros(2, dtype=torch.float64)
    for words, guess in windows(text, steps, whole=True):
        scores, state = model(words, state)
        sums += _counted(_loss(scores, guess), guess)
    return _perplexity(sums if alone else _of_all(sums))


def _train(model: Model, optimizer: torch.optim.Optimizer, text: Rows, config: Config) -> float:
    """Trains for one pass over the text, and returns the perplexity during training."""
    model.train()
    state, sums = model.begin(len(text.read)), torch.zeros(2, dtype=torch.float64)
    for words, guess in windows(text, config.steps, whole=False):
        optimizer.zero_grad()
        scores, state = model(words, state)
        loss = _loss(scores, guess)
        # The sum over the steps, and the mean over the rows. All workers have the same number of rows.
        (loss / len(words)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        sums += _counted(loss, guess)
    return _perplexity(_of_all(sums))


def _loss(scores: Tensor, guess: Tensor) -> Tensor:
    return functional.cross_entropy(
        scores.flatten(0, 1), guess.flatten(), ignore_index=NOTHING, reduction="sum"
    )


def _counted(loss: Tensor, guess: Tensor) -> Tensor:
    return torch.tensor([loss.item(), (guess != NOTHING).sum().item()], dtype=torch.float64)


def _of_all(sums: Tensor) -> Tensor:
    """Returns the sums over all workers: their numbers of words can differ, so perplexities have no mean."""
    return hubring.allreduce(sums, hubring.ReduceOp.SUM, "perplexity")


def _perplexity(sums: Tensor) -> float:
    loss, words = sums.tolist()
    return math.exp(loss / words)


def _start(argv: list[str] | None) -> tuple[argparse.Namespace, slice]:
    """Returns the options, and this worker's rows of the batch."""
    parser = argparse.ArgumentParser(prog="lm_ptb", description="Predict the next word of the Penn Treebank.")
    add = parser.add_argument
    add(
        "--config",
        type=lambda text: text.removeprefix("config_"),  # Texar's script takes the name of a module
        choices=CONFIGS,
        default="small",
        help="size of the model [default: small]",
    )
    add("--data_path", "--data-path", type=Path, required=True, metavar="DIR", help="folder with ptb.*.txt")
    add(
        "--batch_size",
        "--batch-size",
        type=int,
        default=20,
        help="rows of text, over all workers [default: 20]",
    )
    add(
        "--evaluate_on",
        "--evaluate-on",
        choices=("all", "rank0"),
        default="all",
        help="workers that evaluate, each its own rows, or rank 0 all rows [default: all]",
    )
    add("--epochs", type=int, help="passes over the text [default: set by --config]")
    add("--seed", type=int, default=0, help="seed of parameters and dropout [default: 0]")
    options = parser.parse_args(argv)
    hubring.init(aggregate=True)  # the worker clips the norm of the mean gradient
    share, rest = divmod(options.batch_size, hubring.size())
    if rest or share < 1:
        parser.error(f"--batch_size {options.batch_size} is not divisible by {hubring.size()} workers")
    missing = [name for name in map("ptb.{}.txt".format, PARTS) if not (options.data_path / name).is_file()]
    if missing:
        parser.error(f"--data_path {options.data_path} has no {', '.join(missing)}")
    first = hubring.rank() * share
    return options, slice(first, first + share)


def _report(part: str, perplexity: float, epoch: int | None = None) -> None:
    hubring.report(**{f"{part}_perplexity": perplexity})
    _print(f"{'' if epoch is None else f'Epoch: {epoch} '}{part.capitalize()} Perplexity: {perplexity:.3f}")


def _print(line: str) -> None:
    if hubring.rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
