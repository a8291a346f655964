"""A torch.distributed process group whose operations are Works.

Gloo notices a peer whose connection closed, within milliseconds. It does not
notice one that is merely stopped or cut off, and cannot be made to give up: then
whoever watches the ranks calls `fail`. A group is destroyed in good order or
never, since destroying one that has failed waits for the operation under way,
or aborts the process, be it at its exit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring_group import open_group
from hubring.workers.communicators.ring_work import Operations, RingWork

Launch = Callable[[Any], Any]
"""Starts one operation on a process group and returns torch's handle of it."""

FOREVER = timedelta(days=3650)
"""Longer than any job."""

FIRST_BYTES = 504
"""Of what is gathered, go with its length."""

_WORD = 8
"""Bytes of a length."""

_python = ctypes.PyDLL(None)
_python.Py_IncRef.argtypes = _python.Py_DecRef.argtypes = [ctypes.py_object]
_python.Py_IncRef.restype = _python.Py_DecRef.restype = None


class Ring:
    """All ranks' process group.

    Args:
        rank: This process's.
        size: How many there are.
        store: Where ranks find each other; `ring_group.ring_store` makes one.
        backend: `gloo` or `nccl`.
        device: Where the tensors live that are reduced.
        host: This process's address as the other ranks reach it; None finds it by the store.
        timeout: Seconds that one operation, and the first meeting, may take.
        patient: Operations, once the ranks have met, may take for ever.

    Raises:
        ConfigError: The backend does not exist here, or does not fit the device.
        RingBroken: The ranks did not find each other.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        *,
        backend: str,
        device: torch.device,
        host: str | None,
        timeout: float,
        patient: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = None if patient else timeout
        self.operations = Operations(rank)
        self._group = open_group(rank, size, store, backend, device, host, timeout)
        if patient:
            self._group.set_timeout(FOREVER)
        _python.Py_IncRef(self._group)  # outlives the interpreter, unless `close` says otherwise

    def start(self, work: RingWork, launch: Launch) -> None:
        """Starts an operation, of which `work` will tell. All ranks start the same ones in the same order."""
        if not self.operations.begin(work):
            return
        try:
            handle = launch(self._group)
        except RuntimeError as cause:
            self.operations.break_in(work, cause)
            return
        if self.device.type == "cuda":
            self.operations.queued(work, handle)
        else:
            self.operations.follow(work, handle)

    def run(self, what: str, launch: Launch) -> None:
        """Starts an operation and waits for it."""
        work = RingWork(what)
        self.start(work, launch)
        work.wait(self.timeout)

    def exchange(self, whose: Work, launch: Launch) -> None:
        """Starts an operation and waits for it in this thread, so that others may end before it.

        If the ring is given up meanwhile, `whose` fails, and this may never return.
        """
        work = RingWork(whose.what)
        work.when_done(lambda ended: whose.fail(ended.error) if ended.error is not None else None)
        if self.operations.begin(work):
            try:
                launch(self._group).wait(FOREVER)
            except RuntimeError as cause:
                self.operations.break_in(work, cause)
            else:
                self.operations.end(work)
        work.wait()

    def gather(
        self, what: str, data: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Every rank's flat uint8 tensor in rank order, of any length each.

        Where `lengths` are not known, each tensor begins beside its own, and only what is left
        of the longest goes in a second round.
        """
        if lengths is not None:
            return self._gather_padded(what, data, lengths)
        first = torch.zeros(_WORD + FIRST_BYTES, dtype=torch.uint8, device=self.device)
        first[:_WORD] = torch.tensor([data.numel()]).view(torch.uint8)
        first[_WORD : _WORD + data.numel()] = data[:FIRST_BYTES]
        firsts = self._gather_equal(what, first)
        lengths = [int(one[:_WORD].clone().view(torch.int64).item()) for one in firsts]
        heads = [one[_WORD : _WORD + length] for one, length in zip(firsts, lengths, strict=True)]
        left = [max(0, length - FIRST_BYTES) for length in lengths]
        if not any(left):
            return heads
        tails = self._gather_padded(what, data[FIRST_BYTES:], left)
        return [torch.cat([head, tail]) for head, tail in zip(heads, tails, strict=True)]

    def fail(self, error: HubringError) -> None:
        """Ends the ring, from any thread: nothing on it will ever succeed again."""
        self.operations.fail(error)

    def close(self) -> None:
        """Gives the connections back, unless the ring has failed; may be called twice."""
        group, self._group = self._group, None
        if group is None:
            return
        self.operations.close()
        if not self.operations.failed:
            _python.Py_DecRef(group)
        self.operations.fail(RingBroken("this worker has left the ring"))

    def _gather_padded(self, what: str, data: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        if not padded.numel():
            return [padded] * self.size
        return [one[:length] for one, length in zip(self._gather_equal(what, padded), lengths, strict=True)]

    def _gather_equal(self, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.run(what, lambda group: group.allgather([parts], [tensor]))
        return parts
