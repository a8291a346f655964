"""The first difference between what ranks should have alike."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import NamedTuple

import torch

from hubring.workers.collectives.extremes import extremes
from hubring.workers.collectives.gatherings import allgather
from hubring.workers.communicators.base import Communicator


class Difference(NamedTuple):
    """The first line in which a rank differs from rank 0; the lines are empty where there is none."""

    rank: int
    rank_0_has: str
    rank_has: str


def first_difference(lines: Sequence[str], communicator: Communicator, name: str) -> Difference | None:
    """Compares all ranks' lines; if none differ, in one small collective.

    Args:
        lines: This rank's lines.
        communicator: Connects the ranks, which all call it.
        name: Name of the collectives.

    Returns:
        The difference of the lowest rank that differs from rank 0; None if all are equal.
    """
    text = "\n".join(lines).encode()
    digest = int.from_bytes(sha256(text).digest()[:7])
    least, most = extremes([digest], f"{name}.digest", communicator)
    if least == most:
        return None
    length = torch.tensor([len(text)])
    lengths = allgather(length, f"{name}.length", communicator=communicator).tolist()
    own = torch.tensor(list(text), dtype=torch.uint8)
    whole = bytes(allgather(own, f"{name}.names", communicator=communicator).tolist())
    texts = []
    for count in lengths:
        texts.append(whole[:count].decode().split("\n"))
        whole = whole[count:]
    for rank, other in enumerate(texts):
        for here, there in zip_longest(texts[0], other, fillvalue=""):
            if here != there:
                return Difference(rank, here, there)
    return None
