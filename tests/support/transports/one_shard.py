"""One shard with one key in a thread of this process, and clients of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TypeVar

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, TensorSpec, View
from hubring.ps.core.work import Work
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.parameter_memory import ParameterMemory
from hubring.ps.transport.base import Connection, Message, Transport
from hubring.ps.transport.shm.transport import ShmTransport
from tests.support.transports.relay import Relay

T = TypeVar("T")

SOON = 10.0
NUMEL = 6
HYPER = {"lr": -1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}


def as_it_is(connection: Connection) -> Connection:
    """Changes nothing."""
    return connection


class OneShard:
    """A shard whose key 0 has `numel` elements. The step adds the mean gradient to the parameters."""

    def __init__(
        self,
        consistency: Consistency,
        ranks: int,
        transport: Transport | None = None,
        numel: int = NUMEL,
        memory: ParameterMemory | None = None,
    ) -> None:
        self.numel = numel
        self._opened: list[KVClient | Relay] = []
        self.transport = transport or ShmTransport()
        self.listener = self.transport.listen("127.0.0.1")
        self.address = self.listener.address
        self.loop = ShardLoop(consistency, [self.listener], memory)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        members = tuple(Member(rank, rank + 1) for rank in range(ranks))
        bucket = BucketSpec(0, "float32", "SGD", (TensorSpec("weight", (numel,)),))
        self.tell(lambda: self.loop.store.assign([Slice(0, 0, 0, numel, 0)], [bucket]))
        self.tell(lambda: self.loop.send(self.loop.store.on_view(View(1, members))))

    def tell(self, action: Callable[[], object]) -> None:
        """Runs `action` in the shard's thread."""
        self.loop.command(action).result(SOON)

    def ask(self, question: Callable[[ShardLoop], T]) -> T:
        """Returns the answer that the shard's thread gives."""
        return self.loop.command(lambda: question(self.loop)).result(SOON)

    def until(self, condition: Callable[[ShardLoop], bool]) -> None:
        """Returns once the condition holds."""
        deadline = time.monotonic() + SOON
        while not self.ask(condition):
            assert time.monotonic() < deadline, "it did not come to that"

    def behind(self, relay: Callable[[int], Relay]) -> None:
        """Puts a relay, made for the shard's port, between the shard and the clients to come."""
        scheme, _, port = self.address.rpartition(":")
        between = relay(int(port))
        self._opened.append(between)
        self.address = f"{scheme}:{between.port}"

    def client(
        self,
        rank: int,
        wrap: Callable[[Connection], Connection] = as_it_is,
        transport: Transport | None = None,
    ) -> KVClient:
        """Returns a rank's client, which may have a transport of its own. `wrap` changes its connections."""
        dial = (transport or self.transport).dial
        client = KVClient(Sender(rank, rank + 1), 1, lambda _: wrap(dial(self.address, SOON)))
        self._opened.append(client)
        return client

    def stop(self) -> None:
        """Ends the thread."""
        self.loop.stop()
        self.thread.join(SOON)
        assert not self.thread.is_alive()

    def close(self) -> None:
        """Closes all clients and relays, and ends the thread."""
        for each in reversed(self._opened):
            each.close()
        self.stop()


def started() -> Iterator[Callable[..., OneShard]]:
    """Gives what starts shards, which are closed in the end; a fixture where it is named one."""
    with ExitStack() as stack:
        yield lambda *given: stack.enter_context(closing(OneShard(*given)))


class Passing:
    """A connection that passes everything on; a test changes something."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner

    @property
    def waitable(self) -> int:
        return self.inner.waitable

    def send(self, message: Message, into: memoryview | None = None) -> None:
        self.inner.send(message, into)

    def flush(self) -> None:
        self.inner.flush()

    def receive(self) -> list[Message]:
        return self.inner.receive()

    def close(self) -> None:
        self.inner.close()


def begin(client: KVClient, numel: int = NUMEL) -> torch.Tensor:
    """Gives the key zeros, unless it has values, and pulls it."""
    values = torch.zeros(numel)
    for call in (client.init, client.pull):
        work = Work("beginning")
        call(0, 0, values, work)
        work.wait(SOON)
    return values


def push(client: KVClient, gradient: torch.Tensor, into: torch.Tensor, *, attended: bool = True) -> Work:
    """Pushes a gradient; the parameters land in `into`."""
    work = Work("a push", 1, client.attend if attended else None)
    client.push_pull(0, client.prepare(0, gradient, into), HYPER, work)
    return work
