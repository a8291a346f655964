"""The data loaders of `horovod.data`: a base class, and a mixin that reads ahead in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_END = object()
"""What follows the last batch."""


class BaseDataLoader:
    """Iterates over the batches of `_iterate`, which a derived class defines, as it defines `__len__`."""

    def __len__(self) -> int:
        """Returns the number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yields the batches."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Returns the batch that the loop gets."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        return map(self._process_batch, self._iterate())


class AsyncDataLoaderMixin:
    """Put this mixin before a `BaseDataLoader`: a thread then reads batches ahead of the loop.

    The thread lives as long as one loop over the loader; an error in `_iterate` is raised in the loop.

    Args:
        async_loader_queue_size: Most batches that are read ahead; 0: no thread.
        debug_data_loader: Accepted, but has no effect.
        args: Arguments of the next class, as are `kwargs`.
    """

    _iterate: Callable[[], Iterator[Any]]
    _process_batch: Callable[[Any], Any]

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._pool: ThreadPoolExecutor | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the thread. The loop ends after the batches that were read."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from map(self._process_batch, self._iterate())
            return
        self.close_async_loader()
        pool = self._pool = ThreadPoolExecutor(1, "data loader")
        try:
            read = _read_ahead(iter(self._iterate()), self.async_loader_queue_size, pool)
            yield from map(self._process_batch, read)
        finally:
            pool.shutdown(cancel_futures=True)


def _read_ahead(batches: Iterator[Any], most: int, pool: ThreadPoolExecutor) -> Iterator[Any]:
    """Yields batches until the pool is shut down; its thread reads up to `most` ahead."""
    read = deque(pool.submit(next, batches, _END) for _ in range(most))
    with suppress(CancelledError):
        while read and (batch := read.popleft().result()) is not _END:
            with suppress(RuntimeError):  # the pool is shut down
                read.append(pool.submit(next, batches, _END))
            yield batch
