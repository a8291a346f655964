"""The ports on which the processes of a job listen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psutil


class Ports(NamedTuple):
    """Where a job listens.

    Attributes:
        control: The coordinator's gRPC port.
        tcp: All TCP ports: control, page, and those of the shards for ZeroMQ and gRPC.
        shards: The TCP ports of the shards; each is of ZeroMQ or of gRPC.
        shm: The names of the shards' sockets for shared memory, in the abstract namespace.
    """

    control: int
    tcp: list[int]
    shards: list[int]
    shm: list[bytes]


def ports(control: int, server: int, shards: Sequence[int]) -> Ports:
    """Finds the ports of a server process and its shard processes."""
    of_shards = [port for pid in shards for port in listening(pid)]
    # psutil's types know only addresses of the Internet.
    paths = (str(each.laddr) for pid in shards for each in psutil.Process(pid).net_connections("unix"))
    sockets = [path.lstrip("@\0").encode() for path in paths if "hubring-" in path]
    return Ports(control, [*listening(server), *of_shards], of_shards, sorted(set(sockets)))


def listening(pid: int) -> list[int]:
    """Returns the TCP ports on which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})
