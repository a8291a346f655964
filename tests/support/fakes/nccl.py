"""A process group that treats lost members as NCCL does, in host memory over Gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hubring.workers.communicators.ring.group import GroupConnections, RingStore, open_group

HOST = "127.0.0.1"
LIMIT = 60.0
"""Seconds after which an operation without an abort is a bug."""
GARBAGE = 77.0


class FakeNccl:
    """Operations that lose a member never fail.

    Attributes:
        hangs: Whether they then wait until `abort`, as after a kill, and end with garbage; otherwise they end
            with garbage at once, as they may after an abort by another member.
    """

    hangs = True

    def __init__(self, rank: int, size: int, store: RingStore, device: torch.device, timeout: float) -> None:
        self._connections = GroupConnections(HOST)
        self._gloo = open_group(rank, size, store, "gloo", device, HOST, timeout, self._connections)
        self._changed = threading.Condition()
        self._aborted, self._waits = False, 0

    def set_timeout(self, timeout: object) -> None:
        self._gloo.set_timeout(timeout)

    def abort(self) -> None:
        """Returns once no operation is waited for."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self._connections.cut()
        with self._changed:
            assert self._changed.wait_for(lambda: self._waits == 0, LIMIT)

    def settle(self, handle: Any, results: list[torch.Tensor]) -> None:
        with self._changed:
            self._waits += 1
        try:
            handle.wait()
        except RuntimeError:
            with self._changed:
                assert self._changed.wait_for(lambda: self._aborted or not self.hangs, LIMIT), "no abort"
            for tensor in results:
                tensor.fill_(GARBAGE)
        finally:
            with self._changed:
                self._waits -= 1
                self._changed.notify_all()

    def __getattr__(self, name: str) -> Callable[..., Operation]:
        operation = getattr(self._gloo, name)
        return lambda *given: Operation(self, operation(*given), list(_tensors(given[0])))


class Operation:
    """torch's handle of an operation."""

    def __init__(self, group: FakeNccl, handle: Any, results: list[torch.Tensor]) -> None:
        self._group, self._handle, self._results = group, handle, results

    def wait(self) -> None:
        self._group.settle(self._handle, self._results)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    else:
        for one in given:
            yield from _tensors(one)
