"""Text as the language model reads it: words are numbers, and a stream of them lies in rows.

The law: every word of the rows but the first is once the word to be guessed.
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
"""In place of a word to be guessed, where there is none: what cross_entropy leaves out."""


class Corpus(NamedTuple):
    """Three streams of words, int64 each, numbered by how often they occur in the first."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: int
    """How many different ones there are; the streams hold 0 to words - 1."""


class Rows(NamedTuple):
    """A stream in rows: what is read, and the word after each that is to be guessed; int64 [rows, length]."""

    read: Tensor
    guess: Tensor


def read(folder: Path) -> Corpus:
    """Reads `ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt`; a line's end is a word of its own.

    A word that the training text does not hold counts as `<unk>`.

    Raises:
        FileNotFoundError: One of them is missing.
    """
    texts = [_words(folder / f"ptb.{part}.txt") for part in PARTS]
    counts = Counter(texts[0])
    counts[UNKNOWN] += 0  # Penn Treebank's has it, other texts may not
    order = sorted(counts, key=lambda word: (-counts[word], word))
    number = {word: index for index, word in enumerate(order)}
    unknown = number[UNKNOWN]
    train, valid, test = (torch.tensor([number.get(word, unknown) for word in text]) for text in texts)
    return Corpus(train, valid, test, len(number))


def rows(stream: Tensor, batch: int, mine: slice, *, whole: bool) -> Rows:
    """Lays a stream out in `batch` rows, one after the other, and returns some of them.

    Args:
        stream: int64 [n].
        batch: How many rows there are.
        mine: Which of them are this worker's.
        whole: Keeps the words that do not fill a column, with nothing to guess beside them; else
            they are left out.
    """
    pairs = len(stream) - 1
    length = -(-pairs // batch) if whole else pairs // batch
    read, guess = torch.zeros(batch * length, dtype=torch.int64), torch.full((batch * length,), NOTHING)
    kept = min(pairs, batch * length)
    read[:kept], guess[:kept] = stream[:kept], stream[1 : kept + 1]
    return Rows(read.view(batch, length)[mine], guess.view(batch, length)[mine])


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").replace("\n", f" {END} ").split()
