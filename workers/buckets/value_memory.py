"""The memory of a bucket's parameters: where answers land, and what the script sees and may change.

They differ where answers bring parameters: a script that changes a parameter between two steps must not
lose the change, and only a comparison of both shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor


class ValueMemory(Protocol):
    """Flat memory of parameters.

    Attributes:
        landing: Where answers land, on the parameters' device.
        seen: What the script sees; every `parameter.data` is a view of it.
    """

    @property
    def landing(self) -> Tensor: ...

    @property
    def seen(self) -> Tensor: ...

    def written(self, ends: Sequence[int]) -> list[int]:
        """Returns which parts the script changed since the last answer arrived, in order; empty: none.

        Args:
            ends: The end of each part, in bytes, in order.
        """

    def forget(self) -> None:
        """Makes what landed seen, and drops what the script wrote."""


AllocateValues = Callable[[int, torch.dtype, torch.device], ValueMemory]
"""Makes zeroed memory for a number of parameters, as `Communicator.allocate_values` does."""


class OwnValues:
    """Parameters that only this process changes. The script's changes are nothing special."""

    def __init__(self, values: Tensor) -> None:
        self.landing = self.seen = values

    def written(self, ends: Sequence[int]) -> list[int]:
        return []

    def forget(self) -> None:
        """Does nothing: what landed is seen."""


class ComparedValues:
    """Parameters on a GPU, twice in its memory. A question takes one comparison and waits for the device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.landing, self.seen = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
        self._bytes = [flat.view(torch.uint8) for flat in (self.landing, self.seen)]

    def written(self, ends: Sequence[int]) -> list[int]:
        if torch.equal(*self._bytes):
            return []
        landed, seen = self._bytes
        parts = enumerate(pairwise((0, *ends)))
        return [part for part, (start, end) in parts if not torch.equal(landed[start:end], seen[start:end])]

    def forget(self) -> None:
        self.seen.copy_(self.landing)
