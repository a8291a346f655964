"""Pairs of processes to measure a wire: this process and a partner, on this host or on another one.

    python -m MODULE shard HOST      one shard that serves all transports
    python -m MODULE ring DIRECTORY  rank 1 of a ring of two

That partner prints one line when it is ready, then answers each input line with one line: `cpu` with its
processor seconds, and `TIMES NUMEL` with `done` after that many reductions. An empty line or the end of its
input ends it.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from subprocess import PIPE
from typing import Self

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from hubring.ps.client.client import KVClient
from hubring.ps.config.values import is_loopback
from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, TensorSpec, View
from hubring.ps.core.work import Work
from hubring.ps.process.child import Child
from hubring.ps.process.launch import module_command
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.store.consistency import BSP
from hubring.ps.store.parameter_memory import HostMemory
from hubring.ps.transport.registry import open_doors, transport
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.peers.processes import clean_environment

SENDER = Sender(0, 1)
SMALL = 1024
"""Elements of key 0: 4 KB, whose transfer time is only wake-ups."""
LARGE = 1 << 20
"""Elements of each other key: 4 MiB, a slice."""
KEYS = 8
PATIENCE = 30.0
"""Limit of one operation in seconds."""

LARGE_BYTES = KEYS * LARGE * 4
_MODULE = "hubring.workers.compare.predict.pair"


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


class ShardConnection:
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
                self._client.push_pull(0, self._client.prepare(key, gradient, into), {}, work)
        work.wait(PATIENCE)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


@contextmanager
def lines(names: tuple[str, ...]) -> Iterator[tuple[Partner, Mapping[str, ShardConnection]]]:
    """Provides a shard in another process, and a connection to it over each of these transports."""
    with ExitStack() as stack:
        shard = stack.enter_context(Partner("shard", "127.0.0.1"))
        addresses = json.loads(shard.hear())
        opened = ((name, ShardConnection(name, addresses[name])) for name in names)
        yield shard, {name: stack.enter_context(closing(line)) for name, line in opened}


@contextmanager
def ring_of_two() -> Iterator[tuple[Partner, Ring]]:
    """Provides the other rank of a ring in another process, and this process's rank."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="calibrate-"))
        other = stack.enter_context(Partner("ring", directory))
        ring = open_ring(0, directory)
        stack.callback(ring.close)
        other.hear()
        yield other, ring


def serve_link(host: str, *, insecure: bool) -> None:
    """Serves hosts that calibrate, until it is interrupted.

    Args:
        host: Address to listen on.
        insecure: Allow to listen beyond loopback, where any machine can connect.

    Raises:
        UsageError: The address is not loopback and `insecure` is not set.
        KeyboardInterrupt: It was interrupted; everything is closed.
    """
    if not (is_loopback(host) or insecure):
        raise UsageError(f"--serve {host} is open to other machines without credentials; add --insecure")
    loop, addresses = open_shard(host)
    # Not an exception, which could be lost or could interrupt closing.
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    print(f"on the other host, run: ps-compare calibrate --peer {addresses['zmq']}", file=sys.stderr)
    loop.run()
    raise KeyboardInterrupt


# The other end, in its own process.


def open_ring(rank: int, directory: str) -> Ring:
    """Opens one of two ranks that find each other through a file in that directory."""
    store = FileStore(f"{directory}/ring", 2)
    device = torch.device("cpu")
    return Ring(rank, 2, store, backend="gloo", device=device, host="127.0.0.1", timeout=PATIENCE)


def reduce(ring: Ring, tensor: torch.Tensor, times: int) -> None:
    """Sums a tensor on the ring `times` times."""
    for _ in range(times):
        ring.run("a measurement", lambda group: group.allreduce([tensor]))


def open_shard(host: str) -> tuple[ShardLoop, dict[str, str]]:
    """Returns a shard that listens on `host`, and its address by transport; the caller must `run` it."""
    doors = open_doors(host)
    loop = ShardLoop(BSP(), list(doors.listeners.values()), HostMemory(doors.allocate))
    loop.store.on_view(View(1, (Member(*SENDER),)))
    # One small key, then the large ones. They are only averaged: a step is measured without a wire.
    sizes = [SMALL, *[LARGE] * KEYS]
    slices = [Slice(key, 0, sum(sizes[:key]), size, 0) for key, size in enumerate(sizes)]
    loop.assign(slices, [BucketSpec(0, "float32", "", (TensorSpec("zeros", (sum(sizes),)),))])
    return loop, {name: listener.address for name, listener in doors.listeners.items()}


def _serve(host: str) -> None:
    loop, addresses = open_shard(host)
    threading.Thread(target=_obey, args=(json.dumps(addresses), loop.stop), daemon=True).start()
    loop.run()


def _reduce(directory: str) -> None:
    ring = open_ring(1, directory)
    _obey("ready", ring.close, ring)


def _obey(ready: str, end: Callable[[], None], ring: Ring | None = None) -> None:
    print(ready, flush=True)
    while line := sys.stdin.readline().strip():
        if line == "cpu":
            print(time.process_time(), flush=True)
        elif ring is not None:
            times, numel = map(int, line.split())
            reduce(ring, torch.zeros(numel), times)
            print("done", flush=True)
    end()


def main() -> None:
    """Serves until the input ends."""
    torch.set_num_threads(1)  # as in a shard
    role, argument = sys.argv[1:]
    {"shard": _serve, "ring": _reduce}[role](argument)


if __name__ == "__main__":
    main()
