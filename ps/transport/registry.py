"""The transports, and the choice of one for each shard.

Fastest first: shared memory on the same host, ZeroMQ between hosts, gRPC if neither works. ZeroMQ and gRPC
send from any memory, so a worker with local and remote shards keeps all its buffers in shared memory at no
cost.

ZeroMQ and gRPC reach a shard of the same user on the same host by a unix socket, in a directory that only
this user may use. The kernel lets no other user connect there, so it needs no TLS and no seal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ConfigError, ServerUnreachable, ShardAwaited
from hubring.ps.security.access import ShardLock
from hubring.ps.security.token_file import socket_place
from hubring.ps.transport.base import Connection, Listener, Transport
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.host import UNIX, ShardAddress, host_id
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq.transport import ZmqTransport

if TYPE_CHECKING:
    import grpc

__all__ = ["FASTEST_FIRST", "Doors", "ShardAddress", "choose", "host_id", "open_doors", "transport"]

log = logging.getLogger(__name__)

Dial = Callable[[int], Connection]
"""Connects to the shard with this number. Raises ServerUnreachable."""

Locate = Callable[[int], "ShardAddress"]
"""Returns where the shard with this number is now."""

FASTEST_FIRST = ("shm", "zmq", "grpc")
TCP = "-tcp"
"""Suffix of a wanted transport's name: not by a unix socket."""
DIAL_SECONDS = 5.0
MOVE_SECONDS = 5.0
"""How long a shard that is lost may take to move to its standby."""
_MOVE_PAUSE = 0.2


def transport(name: str, *, alone: bool = False) -> Transport:
    """Returns a new transport.

    Args:
        name: The transport's name.
        alone: Whether this process will open only one connection.

    Raises:
        ConfigError: The name is unknown.
    """
    kinds: dict[str, Callable[[], Transport]] = {
        "shm": ShmTransport,
        "zmq": partial(ZmqTransport, apart=alone),
        "grpc": GrpcTransport,
    }
    if name not in kinds:
        raise ConfigError(f"unknown transport {name!r}; use one of auto, {', '.join(FASTEST_FIRST)}")
    return kinds[name]()


class Doors(NamedTuple):
    """A shard's listeners by transport, and memory from which all of them send fastest."""

    listeners: Mapping[str, Listener]
    allocate: Callable[[int], memoryview]


def open_doors(
    host: str,
    register: Sequence[Callable[[grpc.Server], None]] = (),
    rejections: Rejections | None = None,
    lock: ShardLock | None = None,
) -> Doors:
    """Opens listeners on free ports of `host` for every transport.

    Services in `register` share gRPC's port. `rejections` counts what the listeners refuse. Without a `lock`
    any peer may connect.
    """
    refused = rejections or Rejections()
    shared = ShmTransport(guarded=True, rejections=refused)
    kinds: list[Transport] = [
        shared,
        ZmqTransport(rejections=refused, lock=lock),
        GrpcTransport(register, rejections=refused, lock=lock),
    ]
    listeners: dict[str, Listener] = {}
    try:
        for kind in kinds:
            listeners[kind.name] = kind.listen(host)
        port = int(listeners["grpc"].address.rpartition(":")[2])
        near = None if lock is None else replace(lock, identity=None)
        kinds = [
            ZmqTransport(rejections=refused, lock=near),
            GrpcTransport(register, rejections=refused, lock=near),
        ]
        for kind in kinds:
            if path := socket_place(port, kind.name):
                listeners[kind.name + UNIX] = kind.listen(path)
    except BaseException:
        for listener in listeners.values():
            listener.close()
        raise
    return Doors(listeners, shared.allocate)


class Routes(NamedTuple):
    """How a worker reaches its shards. One thread may connect while another allocates.

    Attributes:
        transport: The transport whose memory suits all shards.
        dial: Connects to a shard by the transport that worked.
        wired: Whether a transport other than shared memory is in use.
    """

    transport: Transport
    dial: Dial
    wired: bool


def choose(shards: Sequence[ShardAddress], want: str = "auto", locate: Locate | None = None) -> Routes:
    """Finds the fastest transport for each shard by trying.

    Args:
        shards: The shards' addresses, in order of their numbers.
        want: The name of the only transport to try, or "auto". With `TCP`, it uses no unix sockets.
        locate: Returns where a shard is now. Asked before each further connection to the shard; None if the
            shards never move.

    Raises:
        ServerUnreachable: A shard is unreachable. Names every address tried and why it failed.
    """
    if want.endswith(TCP):
        shards = [shard.by_tcp for shard in shards]
        locate = None if locate is None else partial(_by_tcp, locate)
    names = FASTEST_FIRST if want == "auto" else (want.removesuffix(TCP),)
    kinds = {name: transport(name, alone=len(shards) == 1) for name in names}
    paths = [_path(number, shard, kinds, locate) for number, shard in enumerate(shards)]
    chosen = [path.kind for path in paths]
    best = next(kind for kind in kinds.values() if kind in chosen)
    return Routes(
        best,
        lambda number: paths[number].dial(kinds, locate),
        wired=any(kind.name != "shm" for kind in chosen),
    )


def _by_tcp(locate: Locate, number: int) -> ShardAddress:
    return locate(number).by_tcp


def _path(number: int, shard: ShardAddress, kinds: Mapping[str, Transport], locate: Locate | None) -> _Path:
    """Finds the first path to a shard, which may be moving to its standby. Raises as `reach`."""
    until = time.monotonic() + MOVE_SECONDS
    while True:
        try:
            kind, connection = reach(f"shard {number}", shard, kinds)
        except ServerUnreachable:
            if locate is None or time.monotonic() > until:
                raise
            time.sleep(_MOVE_PAUSE)
            try:
                shard = locate(number)
            except ShardAwaited:
                until = time.monotonic() + MOVE_SECONDS
        else:
            connection.close()
            return _Path(number, shard, kind)


@dataclass(slots=True)
class _Path:
    """How to reach one shard."""

    number: int
    shard: ShardAddress
    kind: Transport
    used: bool = False

    def dial(self, kinds: Mapping[str, Transport], locate: Locate | None) -> Connection:
        """Connects to the shard, which may have moved since the last time."""
        now = locate(self.number) if self.used and locate is not None else self.shard
        self.used = True
        if now == self.shard:
            return dial_by(self.kind, now, DIAL_SECONDS)
        kind, connection = reach(f"shard {self.number}", now, kinds)
        self.shard, self.kind = now, kind
        return connection


def reach(
    name: str, shard: ShardAddress, kinds: Mapping[str, Transport], timeout: float = DIAL_SECONDS
) -> tuple[Transport, Connection]:
    """Connects with the first of `kinds` that works.

    Args:
        name: The shard's name, for messages.
        shard: Its addresses.
        kinds: Transports by name.
        timeout: Seconds for each attempt.

    Raises:
        ServerUnreachable: None of them works.
    """
    failures = []
    for kind in kinds.values():
        try:
            return kind, dial_by(kind, shard, timeout)
        except ServerUnreachable as error:
            log.info("cannot reach %s with %s: %s", name, kind.name, error)
            failures.append(f"{kind.name}: {error}")
    fix = "Check that the shard runs and that no firewall blocks it"
    if len(kinds) == 1:
        fix = "Use --transport auto to try the other transports"
    raise ServerUnreachable(f"cannot reach {name} ({'; '.join(failures)}). {fix}")


def dial_by(kind: Transport, shard: ShardAddress, timeout: float) -> Connection:
    """Connects to a shard with one kind of transport.

    Raises:
        ServerUnreachable: This kind does not reach the shard.
    """
    address = shard.addresses.get(kind.name)
    if address is None:
        raise ServerUnreachable(f"the shard listens only with {', '.join(shard.addresses) or 'no transport'}")
    if kind.name == "shm" and shard.host_id != host_id():
        raise ServerUnreachable(f"{address} is on another host or belongs to another user ({shard.host_id})")
    address, key = shard.way(kind.name)
    return kind.dial(address, timeout, key)
