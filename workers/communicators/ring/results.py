"""The results of a ring's collectives, for members that lack them after a loss.

Law of results, on a ring that heals: a generation's members run the same collectives in one order. A member
that fails in one keeps its call. What other members have completed, they give it: results that are alike on
all members. The rest is run again by the members of the next generation. A result that differs by member, as
of a scatter, cannot be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.types import DtypeAndShape
from hubring.ps.store.collective import layout_of
from hubring.ps.store.collective_rounds import ROUND_BYTES
from hubring.workers.communicators.ring.collectives import bundle, unbundle

ALIKE = {
    Collective.ALLREDUCE,
    Collective.ALLGATHER,
    Collective.BROADCAST,
    Collective.BARRIER,
    Collective.JOIN,
}
"""Collectives whose result is the same on all members."""


class CallResult(NamedTuple):
    """What a collective has brought.

    Attributes:
        number: Counts the collectives of a generation.
        name: The call's name.
        given: Whether the tensors are the same on all members.
        refusal: Why the calls did not fit together; empty if they did.
    """

    number: int
    name: str
    given: bool
    refusal: str
    tensors: Sequence[Tensor]


class CallResults:
    """The results of a generation that some member may lack: those since the members last met in a gather.

    Args:
        room: Keeps the first results until they need so many bytes.
    """

    def __init__(self, room: int = 0) -> None:
        self.count = 0
        self._room = room
        self._kept: list[CallResult] = []

    @property
    def complete(self) -> bool:
        """Whether all results are kept."""
        return self._room > 0

    def begin_round(self) -> None:
        """Drops all results: every member has them, or it could not have come to the next gather."""
        if not self.complete:
            self._kept.clear()

    def note(self, call: Call, refusal: str, tensors: Sequence[Tensor]) -> None:
        """Keeps the result of the next collective."""
        self.count += 1
        self._room -= ROUND_BYTES + sum(one.nbytes for one in tensors)
        given = call.collective in ALIKE
        self._kept.append(
            CallResult(
                self.count, call.name, given, refusal, [one.clone() for one in tensors] if given else []
            )
        )

    def extend(self, results: Sequence[CallResult]) -> None:
        """Adds results that another member has given."""
        self._kept += results
        self.count = results[-1].number if results else self.count

    def after(self, count: int) -> Tensor:
        """Returns the results after the first `count` collectives as flat bytes."""
        kept = [result for result in self._kept if result.number > count]
        heads = [_Head(*result[:4], tuple(map(layout_of, result.tensors))) for result in kept]
        head = msgspec.json.encode(heads)
        parts = [
            torch.tensor([len(head)], device="cpu").view(torch.uint8),
            torch.frombuffer(bytearray(head), dtype=torch.uint8),
        ]
        return torch.cat([*parts, *(bundle(result.tensors) for result in kept)])


class _Head(NamedTuple):
    number: int
    name: str
    given: bool
    refusal: str
    layouts: tuple[DtypeAndShape, ...]


_heads = msgspec.json.Decoder(list[_Head])


def results_of(memory: Tensor) -> list[CallResult]:
    """Returns the results that `CallResults.after` has made bytes of."""
    memory = memory.cpu()
    length = int(memory[:8].clone().view(torch.int64).item())
    heads = _heads.decode(bytes(memory[8 : 8 + length].numpy()))
    results, start = [], 8 + length
    for number, name, given, refusal, layouts in heads:
        nbytes = sum(layout.nbytes for layout in layouts)
        piece = memory[start : start + nbytes].clone()
        results.append(CallResult(number, name, given, refusal, unbundle(piece, layouts)))
        start += nbytes
    return results
