"""The parameter server of peer `ray`: an actor that averages and steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hubring.ps.core.types import Hyper
from hubring.ps.optim.server_optimizer import Assign, SliceOptimizer, SliceStep

Array = NDArray[np.floating[Any]]


class Server:
    """Runs in Ray's process; every call is a coroutine of its one event loop.

    Args:
        size: How many workers there are.
    """

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)  # as a shard does
        self._size = size
        self._rounds: list[Round] = []
        self._given: dict[int, Any] = {}
        self._gathered: asyncio.Future[list[Any]] | None = None
        self._left = 0
        self._all_left = asyncio.Event()

    async def gather(self, rank: int, value: Any) -> list[Any]:
        """Takes a rank's value; returns every rank's, in rank order."""
        if self._gathered is None:
            self._gathered = asyncio.get_running_loop().create_future()
        gathered, self._given[rank] = self._gathered, value
        if len(self._given) == self._size:
            given, self._given, self._gathered = self._given, {}, None
            gathered.set_result([given[each] for each in range(self._size)])
        return await gathered

    async def hold(self, values: Sequence[Array], optimizers: Sequence[str]) -> None:
        """Takes the buckets' first values, and the names of what steps them; empty: it is only averaged."""
        self._rounds = [Round(*pair, size=self._size) for pair in zip(values, optimizers, strict=True)]

    async def push_pull(self, number: int, gradients: Array, hyper: Hyper) -> Array:
        """Takes a rank's gradients of a bucket; returns its values after the step, or the mean."""
        return await self._rounds[number].push(gradients, hyper)

    async def leave(self) -> None:
        """Notes that a worker is done."""
        self._left += 1
        if self._left == self._size:
            self._all_left.set()

    async def end(self) -> None:
        """Returns once all workers are done."""
        await self._all_left.wait()


class Round:
    """A bucket's values, and the ranks' gradients of the step under way."""

    def __init__(self, values: Array, optimizer: str, size: int) -> None:
        self._values = torch.from_numpy(values.copy())  # what Ray hands out cannot be written
        self._optimizer: SliceStep = SliceOptimizer(optimizer) if optimizer else Assign()
        self._size = size
        self._given = 0
        self._sum = np.zeros_like(values)
        self._stepped: asyncio.Future[Array] | None = None

    async def push(self, gradients: Array, hyper: Hyper) -> Array:
        """Takes a rank's gradients; returns the same to all ranks once the last one's are here."""
        if self._stepped is None:
            self._stepped = asyncio.get_running_loop().create_future()
        stepped, self._given = self._stepped, self._given + 1
        if self._given == 1:
            np.copyto(self._sum, gradients)
        else:
            np.add(self._sum, gradients, out=self._sum)
        if self._given == self._size:
            self._given, self._stepped = 0, None
            total = torch.from_numpy(self._sum)
            self._optimizer.step(self._values, [total], self._size, hyper, total)
            stepped.set_result(self._values.numpy())
        return await stepped
