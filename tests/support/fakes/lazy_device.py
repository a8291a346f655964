"""A device that does no work until a thread waits for it, and then only the work that the wait needs.

It is the slowest device that is still correct: work that no mark orders happens too late. So a test that
passes on it shows that the code requests all of the order that it needs. Tensors "on the device" are CPU
tensors that only queued work touches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from hubring.ps.compression.gpu_tensor import Mark


class LazyMark:
    """Marks the work that a queue held when the mark was made."""

    def __init__(self, device: LazyDevice, queue: str, length: int) -> None:
        self.device = device
        self.queue = queue
        self.length = length

    def synchronize(self) -> None:
        self.device.waits.append((threading.current_thread().name, self.queue))
        self.device.reach(self)


class LazyDevice:
    """A device with named queues; a training script uses the queue `train`.

    Attributes:
        log: The completed work, in order.
        waits: The thread's name and the queue of each wait for the device.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waits: list[tuple[str, str]] = []
        self._lock = threading.RLock()
        self._queues: dict[str, list[Callable[[], None]]] = {"train": [], "out": [], "in": []}
        self._done = dict.fromkeys(self._queues, 0)

    def compute(self, what: str, kernel: Callable[[], object]) -> None:
        """Queues work on `train`, like a forward or backward pass."""
        self._queue("train", what, kernel)

    def mark(self) -> Mark:
        return self._mark("train")

    def copy_out(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        self._behind("out", after)
        self._queue("out", "copy out", lambda: target.copy_(source))
        return self._mark("out")

    def copy_in(self, source: Tensor, target: Tensor, after: Mark | None = None) -> None:
        if after is not None:
            self._behind("in", after)
        self._queue("in", "copy in", lambda: target.copy_(source))

    def landed(self) -> Mark:
        return self._mark("in")

    def follow(self, mark: Mark) -> None:
        self._behind("train", mark)

    def look(self, tensor: Tensor) -> Tensor:
        """Returns what a script sees that prints a tensor: it waits only for its own stream."""
        self.reach(self._mark("train"))
        return tensor.clone()

    def reach(self, mark: LazyMark) -> None:
        """Does the work before the mark, and the work that it waits for."""
        with self._lock, torch.no_grad():
            while self._done[mark.queue] < mark.length:
                place = self._done[mark.queue]
                self._queues[mark.queue][place]()
                self._done[mark.queue] = place + 1

    def _mark(self, queue: str) -> LazyMark:
        with self._lock:
            return LazyMark(self, queue, len(self._queues[queue]))

    def _queue(self, queue: str, what: str, kernel: Callable[[], object]) -> None:
        def run() -> None:
            kernel()
            self.log.append(what)

        with self._lock:
            self._queues[queue].append(run)

    def _behind(self, queue: str, mark: Mark) -> None:
        assert isinstance(mark, LazyMark)
        with self._lock:
            self._queues[queue].append(lambda: mark.device.reach(mark))


class PromptDevice(LazyDevice):
    """A device that trains in the calling thread, like a CPU; its copies are still lazy."""

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, LazyMark)
        self.reach(mark)


class HastyDevice(PromptDevice):
    """A device whose copies from the host are done at once, whatever else is queued."""

    def copy_in(self, source: Tensor, target: Tensor, after: Mark | None = None) -> None:
        target.copy_(source)
