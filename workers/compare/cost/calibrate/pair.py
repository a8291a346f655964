"""Pairs of processes to measure a wire: this process and a partner."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from subprocess import PIPE
from typing import Self

import torch
from torch import Tensor

from hubring.ps.client.client import KVClient
from hubring.ps.core.errors import HubringError
from hubring.ps.core.work import Work
from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command
from hubring.ps.transport.registry import transport
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.compare.cost.calibrate import partner
from hubring.workers.compare.cost.calibrate.partner import KEYS, LARGE, PATIENCE, SENDER, SMALL
from hubring.workers.compare.run.runner import clean_environment

LARGE_BYTES = KEYS * LARGE * 4
_MODULE = "hubring.workers.compare.cost.calibrate.partner"


class PartnerLost(HubringError):
    """The other process ended; its error output is above."""


class Partner(Child):
    """The other process; leaving the `with` block ends it.

    Args:
        role: `shard` or `ring`.
        argument: Argument of the role.
    """

    def __init__(self, role: str, argument: str) -> None:
        command = module_command(_MODULE, role, argument)
        super().__init__(_MODULE, command, clean_environment(1), stdin=PIPE, stdout=PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(PATIENCE)
        self.stdout.close()

    def hear(self) -> str:
        """Returns its next line.

        Raises:
            PartnerLost: The process ended.
        """
        if not (line := self.stdout.readline()):
            self.wait()
            raise PartnerLost(f"{self} {self.ended}; see its error output above")
        return line.decode().strip()

    def cpu(self) -> float:
        """Returns the processor seconds of it and this process."""
        self.tell("cpu")
        return float(self.hear()) + time.process_time()


class Line:
    """A worker's connection to a shard over one transport.

    Args:
        name: Name of the transport.
        address: Address of the shard.
    """

    def __init__(self, name: str, address: str) -> None:
        wire = transport(name)
        self._client = KVClient(SENDER, 1, lambda _: wire.dial(address, PATIENCE))
        self._client.wait_connected(PATIENCE)
        self._small = self._memory(wire.allocate, SMALL)
        self._large = [self._memory(wire.allocate, LARGE) for _ in range(KEYS)]
        self._into = [self._memory(lambda nbytes: wire.window(nbytes).landing, LARGE) for _ in range(KEYS)]
        for key, into in enumerate((self._small, *self._into)):
            work = Work("a first pull")
            self._client.pull(0, key, into, work)
            work.wait(PATIENCE)

    @staticmethod
    def _memory(allocate: Callable[[int], memoryview], numel: int) -> Tensor:
        return torch.frombuffer(allocate(4 * numel), dtype=torch.float32)[:numel]

    def exchange_small(self) -> None:
        """Exchanges one small message and its answer."""
        self._exchange([(0, self._small, self._small)])

    def exchange_large(self) -> None:
        """Sends LARGE_BYTES and receives as many, in slices that follow each other directly."""
        self._exchange(list(zip(range(1, 1 + KEYS), self._large, self._into, strict=True)))

    def _exchange(self, parts: list[tuple[int, Tensor, Tensor]]) -> None:
        work = Work("a measurement", len(parts), self._client.attend)
        with self._client.batched():
            for key, gradient, into in parts:
                self._client.push_pull(0, key, gradient, into, {}, work)
        work.wait(PATIENCE)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


@contextmanager
def lines(names: tuple[str, ...], host: str = "127.0.0.1") -> Iterator[tuple[Partner, Mapping[str, Line]]]:
    """Provides a shard in another process, and a connection to it over each of these transports."""
    with ExitStack() as stack:
        shard = stack.enter_context(Partner("shard", host))
        addresses = json.loads(shard.hear())
        opened = {}
        for name in names:
            opened[name] = Line(name, addresses[name])
            stack.callback(opened[name].close)
        yield shard, opened


@contextmanager
def ring_of_two() -> Iterator[tuple[Partner, Ring]]:
    """Provides the other rank of a ring in another process, and this process's rank."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="calibrate-"))
        other = stack.enter_context(Partner("ring", directory))
        ring = partner.open_ring(0, directory)
        stack.callback(ring.close)
        other.hear()
        yield other, ring
