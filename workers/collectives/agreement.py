"""Compares what all ranks should have alike, and copies rank 0's named tensors to all.

The least and the largest of the ranks' numbers show in one collective whether they agree. If texts
differ, the first difference is found. Named tensors are a model's buffers and frozen parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import ReduceOp
from hubring.workers.collectives.moving import allgather, broadcast_into
from hubring.workers.collectives.reductions import allreduce, allreduce_async
from hubring.workers.communicators.base import CollectiveWork, Communicator


def extremes(numbers: Sequence[int], name: str, communicator: Communicator) -> tuple[list[int], list[int]]:
    """Returns the least and the largest of each number over all ranks, in one collective.

    Args:
        numbers: As many on every rank, of at most 63 bits.
        name: Name of the collective.
        communicator: Connects the ranks, which all call it.
    """
    return _apart(allreduce(_both(numbers), ReduceOp.MAX, name, communicator=communicator))


def start_extremes(
    numbers: Sequence[int],
    name: str,
    communicator: Communicator,
    then: Callable[[list[int], list[int]], None],
) -> None:
    """As `extremes`, without waiting: calls `then`, in any thread, once all ranks have called it."""

    def done(work: CollectiveWork) -> None:
        if work.error is None:
            then(*_apart(work.result))

    work = allreduce_async(_both(numbers), ReduceOp.MAX, name, communicator=communicator)
    work.when_done(lambda _: done(work))


def _both(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor([*numbers, *(-number for number in numbers)], device="cpu")


def _apart(most: torch.Tensor) -> tuple[list[int], list[int]]:
    largest, negated = most.view(2, -1).tolist()
    return [-number for number in negated], largest


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
    length = torch.tensor([len(text)], device="cpu")
    lengths = allgather(length, f"{name}.length", communicator=communicator).tolist()
    own = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
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


Named = Sequence[tuple[str, Tensor]]


def share_from_rank_0(named: Named, communicator: Communicator, name: str, timeout: float | None) -> None:
    """Overwrites tensors with rank 0's, after all ranks have compared names, shapes and dtypes.

    Args:
        named: Tensors of any dtype and layout, also expanded ones, by name. All ranks must call it, with or
            without tensors.
        communicator: Connects the ranks.
        name: Name of the collectives.
        timeout: Seconds that it may take; None: no limit.

    Raises:
        ConfigError: Two ranks differ. The error names both and the first difference.
    """
    if communicator.size == 1:
        return
    lines = [f"{what} {str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for what, one in named]
    found = first_difference(lines, communicator, name)
    if found is not None:
        raise ConfigError(
            f"rank 0 and rank {found.rank} have models with different buffers or frozen parameters: rank 0"
            f" has {found.rank_0_has or 'none'}, rank {found.rank} has {found.rank_has or 'none'}; make the"
            " same model on all ranks"
        )
    whole = [plain_copy(tensor) for _, tensor in named]
    broadcast_into(whole, communicator, name, timeout)
    with torch.no_grad():
        for (_, tensor), plain in zip(named, whole, strict=True):
            overwrite(tensor, plain)


def plain_copy(tensor: Tensor) -> Tensor:
    """Returns a copy as an ordinary tensor: dense, contiguous, without lazy conjugation or expansion."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def overwrite(tensor: Tensor, plain: Tensor) -> None:
    """Overwrites a tensor of any layout in place."""
    if tensor.layout is not torch.strided:
        tensor.copy_(plain.to_sparse(layout=tensor.layout))
        return
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:  # expanded: all entries are the same memory
            tensor, plain = tensor.narrow(dimension, 0, 1), plain.narrow(dimension, 0, 1)
    tensor.copy_(plain)
