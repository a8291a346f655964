"""Which transports there are, and which one to take to which shard.

Fastest first: shared memory on one host, ZeroMQ between hosts, gRPC wherever
the others are cut off. ZeroMQ and gRPC send from any memory, so a worker whose
shards are near and far keeps all its buffers in shared memory and loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hubring.ps.core.errors import ConfigError, ServerUnreachable
from hubring.ps.transport.base import Connection, Listener, Transport
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.host import host_id
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq.transport import ZmqTransport

if TYPE_CHECKING:
    import grpc

__all__ = ["FASTEST_FIRST", "Doors", "ShardAddress", "choose", "host_id", "open_doors", "transport"]

log = logging.getLogger(__name__)

Dial = Callable[[int], Connection]
"""Connects to the shard of this number; raises ServerUnreachable."""

FASTEST_FIRST = ("shm", "zmq", "grpc")
DIAL_SECONDS = 5.0


class ShardAddress(NamedTuple):
    """Where a shard listens: the host it is on (`host_id`), and its address by each transport."""

    host_id: str
    addresses: Mapping[str, str]


def transport(name: str, *, alone: bool = False) -> Transport:
    """A new transport of this name.

    Args:
        name: Its own.
        alone: One connection is all that this process will dial.

    Raises:
        ConfigError: There is none.
    """
    kinds: dict[str, Callable[[], Transport]] = {
        "shm": ShmTransport,
        "zmq": partial(ZmqTransport, apart=alone),
        "grpc": GrpcTransport,
    }
    if name not in kinds:
        raise ConfigError(f"no transport is called {name!r}; there are auto, {', '.join(FASTEST_FIRST)}")
    return kinds[name]()


class Doors(NamedTuple):
    """Where a shard is reached, by transport, and memory that all of these send from at their best."""

    listeners: Mapping[str, Listener]
    allocate: Callable[[int], memoryview]


def open_doors(host: str, register: Sequence[Callable[[grpc.Server], None]] = ()) -> Doors:
    """Listens on free ports of `host` by every transport; the services in `register` share gRPC's port."""
    shared = ShmTransport(guarded=True)
    kinds: list[Transport] = [shared, ZmqTransport(), GrpcTransport(register)]
    listeners: dict[str, Listener] = {}
    try:
        for kind in kinds:
            listeners[kind.name] = kind.listen(host)
    except BaseException:
        for listener in listeners.values():
            listener.close()
        raise
    return Doors(listeners, shared.allocate)


class Ways(NamedTuple):
    """How a worker reaches its shards. One thread may dial while another allocates.

    Attributes:
        transport: Whose memory suits all shards.
        dial: Dials a shard by the transport that worked.
        wired: Some shard is reached over a wire, and not in shared memory.
    """

    transport: Transport
    dial: Dial
    wired: bool


def choose(shards: Sequence[ShardAddress], want: str = "auto", timeout: float = DIAL_SECONDS) -> Ways:
    """Finds the best way to each shard by trying.

    Args:
        shards: Where each of them is, in order of their numbers.
        want: A transport's name, to take no other; or "auto".
        timeout: Seconds for one attempt.

    Raises:
        ServerUnreachable: Some shard cannot be reached; names every address tried, and why it failed.
    """
    names = FASTEST_FIRST if want == "auto" else (want,)
    kinds = {name: transport(name, alone=len(shards) == 1) for name in names}
    ways: list[Transport] = []
    for number, shard in enumerate(shards):
        way, connection = _reach(number, shard, kinds, timeout)
        connection.close()
        ways.append(way)
    best = next(kind for kind in kinds.values() if kind in ways)
    return Ways(
        best,
        lambda number: ways[number].dial(shards[number].addresses[ways[number].name], timeout),
        wired=any(way.name != "shm" for way in ways),
    )


def _reach(
    number: int, shard: ShardAddress, kinds: Mapping[str, Transport], timeout: float = DIAL_SECONDS
) -> tuple[Transport, Connection]:
    """Connects by the first of `kinds` that works.

    Raises:
        ServerUnreachable: None does.
    """
    failures = []
    for kind in kinds.values():
        try:
            return kind, _dial_by(kind, shard, timeout)
        except ServerUnreachable as error:
            log.info("no way to shard %d by %s: %s", number, kind.name, error)
            failures.append(f"{kind.name}: {error}")
    mend = "check that it runs and that no firewall is between"
    if len(kinds) == 1:
        mend = "take --transport auto to let others be tried"
    raise ServerUnreachable(f"cannot reach shard {number}; {mend}. Tried {'; '.join(failures)}")


def _dial_by(kind: Transport, shard: ShardAddress, timeout: float) -> Connection:
    address = shard.addresses.get(kind.name)
    if address is None:
        raise ServerUnreachable(f"it listens only by {', '.join(shard.addresses) or 'nothing'}")
    if kind.name == "shm" and shard.host_id != host_id():
        raise ServerUnreachable(f"{address} is on another host or another user's ({shard.host_id})")
    return kind.dial(address, timeout)
