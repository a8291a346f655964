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

from hubring.ps.transport.window import Window


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

    def look(self) -> Look:
        """Starts to look for what the script changed, before the next answer may land; does not wait.

        If nothing has changed, it also forgets what the script wrote and took back, as swapping in averaged
        weights does: a page that was written to would still show the old values when the next answer lands.
        """

    def forget(self) -> None:
        """Makes what landed seen, and drops what the script wrote."""


Look = Callable[[], bool]
"""Returns whether the script had changed something when the look began. On a GPU it waits until the device
has got there."""

AllocateValues = Callable[[int, torch.dtype, torch.device], ValueMemory]
"""Makes zeroed memory for a number of parameters, as `Communicator.allocate_values` does."""


def later(found: Tensor) -> Look:
    """Returns a look with the answer that a flag of one element will have; does not wait for it."""
    if not found.is_cuda:
        return lambda: bool(found)
    here = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
    here.copy_(found, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(found.device))

    def ask() -> bool:
        copied.synchronize()
        return bool(here)

    return ask


class OwnValues:
    """Parameters that only this process changes. The script's changes are nothing special."""

    def __init__(self, values: Tensor) -> None:
        self.landing = self.seen = values

    def written(self, ends: Sequence[int]) -> list[int]:
        return []

    def look(self) -> Look:
        return nothing

    def forget(self) -> None:
        """Does nothing: what landed is seen."""


def nothing() -> bool:
    """A look that finds no change."""
    return False


class WindowValues:
    """Parameters on the CPU. The kernel finds the pages that the script has written to.

    Args:
        window: At least one element.
        dtype: Of the parameters.
    """

    def __init__(self, window: Window, dtype: torch.dtype) -> None:
        self.landing = torch.frombuffer(window.landing, dtype=dtype)
        self.seen = torch.frombuffer(window.seen, dtype=dtype)
        self._window = window
        self.forget = window.forget

    def written(self, ends: Sequence[int]) -> list[int]:
        return self._window.written(ends)

    def look(self) -> Look:
        return (lambda: True) if self._window.is_written() else nothing


class ComparedValues:
    """Parameters on any device, three times in its memory: landing, seen, and what the last answer made seen.

    The next answer may land while the script trains, so only the third shows what the script has changed.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        made = [torch.zeros(numel, dtype=dtype, device=device) for _ in range(3)]
        self.landing, self.seen, self._arrived = made
        self._seen_bits, self._arrived_bits = (flat.view(BITS[dtype.itemsize]) for flat in made[1:])

    def written(self, ends: Sequence[int]) -> list[int]:
        if not self.look()():
            return []
        arrived, seen = self._arrived.view(torch.uint8), self.seen.view(torch.uint8)
        parts = enumerate(pairwise((0, *ends)))
        return [part for part, (start, end) in parts if not torch.equal(arrived[start:end], seen[start:end])]

    def look(self) -> Look:
        return later((self._arrived_bits != self._seen_bits).any())

    def forget(self) -> None:
        self.seen.copy_(self.landing)
        self._arrived.copy_(self.landing)


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that show an element's bits, by its bytes. Bits are compared, since a NaN equals itself then."""
