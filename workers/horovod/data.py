"""The data loaders of `horovod.data`: a base class, and a mixin that reads ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


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
        self._reader: _Reader | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the thread. The loop ends after the batches that were read."""
        if self._reader is not None:
            self._reader.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from map(self._process_batch, self._iterate())
            return
        self.close_async_loader()
        reader = self._reader = _Reader(self._iterate(), self.async_loader_queue_size)
        try:
            yield from map(self._process_batch, reader)
        finally:
            reader.close()


class _Reader(Thread):
    """Reads up to `most` batches ahead. The process ends without it: a script may keep an unfinished loop."""

    def __init__(self, batches: Iterator[Any], most: int) -> None:
        super().__init__(name="data loader", daemon=True)
        self._batches, self._free, self._closed = batches, Semaphore(most), False
        self._read: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        """Batches; last (False, error), with None for no error."""
        self.start()

    def __iter__(self) -> Iterator[Any]:
        while (item := self._read.get())[0]:
            self._free.release()
            yield item[1]
        if item[1] is not None:
            raise item[1]

    def close(self) -> None:
        """Ends the thread, and waits for the batch that it reads."""
        self._closed = True
        self._free.release()
        self.join()

    def run(self) -> None:
        error = None
        try:
            for batch in self._batches:
                self._free.acquire()
                if self._closed:
                    break
                self._read.put((True, batch))
        except Exception as caught:  # any error: the loop raises it
            error = caught
        self._read.put((False, error))
