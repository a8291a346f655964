"""The processes of a server, by what they do, and where they listen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psutil

from tests.support.processes.cluster import Cluster
from tests.support.processes.process_tree import coordinators


def server_processes(cluster: Cluster, address: str) -> dict[str, int]:
    """Returns the process ids of shards and their standbys, as far as they are there.

    With `--standby`, those of the coordinator and its standby too; without, the coordinator is in the program
    itself.
    """
    found: dict[str, int] = {}
    for row in cluster.status(address)["shards"]:
        found[f"shard {row['shard']}"] = row["pid"]
        if row["standby"] is not None:
            found[f"standby of shard {row['shard']}"] = row["standby"]["pid"]
    found.update(zip(("coordinator", "standby of coordinator"), coordinators(), strict=False))
    return found


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
