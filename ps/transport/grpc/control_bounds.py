"""How much of a server the callers of its control port can take."""

from __future__ import annotations

from hubring.ps.config.server import ServerConfig
from hubring.ps.core import descriptors
from hubring.ps.core.types import MAX_WORLD_SIZE
from hubring.ps.transport.grpc.channel import STRANGERS

SPARE_CONNECTIONS = 64
"""Connections of command lines and probes.

A stranger's takes up to 1 MB: its handshake, 10,000 acknowledgements that it does not read, and its calls.
"""

CONNECTION_CALLS = 32
"""Maximum number of open calls of one connection. A refused one takes 21 kB until its caller has read why.

A worker has about six: its open call, a heartbeat and its repetition, one call of training, two of torch.
gRPC counts a call for some time after its end, and fails calls with UNAVAILABLE from half of the maximum on.
"""


def options(config: ServerConfig) -> list[tuple[str, int]]:
    """Returns the options of the control port's gRPC server."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", 4 << 20),
        ("grpc.max_allowed_incoming_connections", descriptors.share(_members(config) + SPARE_CONNECTIONS, 3)),
        ("grpc.max_concurrent_streams", CONNECTION_CALLS),
        ("grpc.http2.bdp_probe", 0),  # a window that grows by itself lets strangers fill memory
        *STRANGERS,
    ]


def _members(config: ServerConfig) -> int:
    """Returns how many processes connect. The next job's workers can do so before a job has ended."""
    workers = 2 * config.workers * (1 + config.colocate) or MAX_WORLD_SIZE
    return workers + (1 + config.standby) * (config.shards + config.await_shards)
