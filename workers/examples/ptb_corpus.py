"""The text of the language model: a stream of word numbers, arranged in rows.

The rule: every word of the stream except the first is a target exactly once.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PARTS = ("train", "valid", "test")
END, UNKNOWN = "<eos>", "<unk>"
NOTHING = -100
"""Marks a position without a target; cross_entropy ignores it."""


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
