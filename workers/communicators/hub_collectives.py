"""Collectives through the shards: each is one call to the shard that its name selects.

Calls are numbered, so that a shard runs each one once, even if a broken connection makes a worker send it
again, and knows which results no worker will ask for again.
"""

from __future__ import annotations

import threading
import zlib
from functools import partial

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.core.messages import Call, Collective, Contribute
from hubring.ps.core.work import Work
from hubring.workers.communicators.base import CollectiveWork

MOST_CLOSED = 256
"""Maximum number of closed calls that one message lists: headers are small."""


class CallIds:
    """Numbers a worker's calls to one shard from 1, and records which have their reply. Safe from any thread.

    Invariant: the number of an open call is above `settled` and is never listed as closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}
        """In ascending order."""
        self._closed: list[int] = []
        """Closed calls that no message has listed yet."""

    def open(self) -> tuple[int, int, tuple[int, ...]]:
        """Opens a call.

        Returns:
            The call's number; `settled`, up to which all calls are closed; and closed calls above it.
            A closed call is returned once.
        """
        with self._lock:
            self._last += 1
            self._open[self._last] = None
            settled = next(iter(self._open)) - 1
            beyond = [number for number in self._closed if number > settled]
            self._closed = beyond[MOST_CLOSED:]
            return self._last, settled, tuple(beyond[:MOST_CLOSED])

    def close(self, number: int) -> None:
        """Closes a call that has its reply and will not ask for it again."""
        with self._lock:
            del self._open[number]
            self._closed.append(number)


class HubCollectives:
    """One worker's collectives.

    Args:
        client: Connections to the shards.
        shards: Number of shards.
    """

    def __init__(self, client: KVClient, shards: int) -> None:
        self._client = client
        self._shards = shards
        self._call_ids = [CallIds() for _ in range(shards)]
        self._calling = threading.Lock()

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        """See `Communicator.take_part`."""
        shards = self._shards_of(call)
        came: dict[int, list[torch.Tensor]] = {}
        carried = Work(work.what, len(shards))
        work.attend = self._client.attend
        numbers: dict[int, int] = {}

        def on_end(_: Work) -> None:
            for shard, number in numbers.items():
                self._call_ids[shard].close(number)
            if carried.error is None:
                work.deliver(came[shards[0]])
            else:
                work.fail(carried.error)

        with self._calling:  # calls with one name must arrive in the order of their numbers
            for shard in shards:
                numbers[shard], settled, closed = self._call_ids[shard].open()
                request = Contribute(self._client.sender, numbers[shard], call, tensors, settled, closed)
                self._client.contribute(shard, request, carried, partial(_keep, came, shard))
        carried.when_done(on_end)

    def _shards_of(self, call: Call) -> range:
        """Returns the shards of a call. All ranks compute the same shard from the name; a join uses all."""
        if call.collective is Collective.JOIN:
            return range(self._shards)
        shard = zlib.crc32(call.name.encode()) % self._shards
        return range(shard, shard + 1)


def _keep(came: dict[int, list[torch.Tensor]], shard: int, results: tuple[torch.Tensor, ...]) -> None:
    came[shard] = [result.clone() for result in results]
