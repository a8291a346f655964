"""A bucket's parameters in a transport's window."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hubring.ps.transport.base import Window
from hubring.workers.buckets.value_memory import Look, nothing


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

    def written(self, ends: Sequence[int]) -> list[int]:
        return self._window.written(ends)

    def look(self) -> Look:
        if self._window.written([self.seen.nbytes]):
            return lambda: True
        self._window.forget()
        return nothing

    def forget(self) -> None:
        self._window.forget()
