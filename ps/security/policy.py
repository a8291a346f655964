"""Who may call which RPC.

Every RPC of every service has an entry, and a guard refuses those without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What a secret lets its holder do."""

    WORKER = "worker"
    SHARD = "shard"
    READER = "reader"
    """Reads the status."""
    OPERATOR = "operator"
    """Reads the status and changes the server."""
    HUB = "hub"
    """The coordinator that a shard has registered with."""
    MEMBER = "member"
    """A worker that the shard's coordinator has let in."""


class Policy(NamedTuple):
    """Who may call one RPC.

    Attributes:
        roles: The roles that may call it.
        open: Why a call needs no secret; empty if only these roles may call it.
        former: Why secrets from before a rotation are good enough; empty if they are not.
    """

    roles: frozenset[Role] = frozenset()
    open: str = ""
    former: str = ""


def _only(*roles: Role, former: str = "") -> Policy:
    return Policy(frozenset(roles), former=former)


_KNOWN = "the service refuses processes that it does not know, so a process that waits may ask again"
_MEMBER = "each call also has an incarnation or a shard's token, which the service checks"
_TIME = "the reply is only the time"

_PROBE = Policy(open="probes of containers have no secret, and learn only what serves, and why not")

POLICIES: Mapping[str, Policy] = {
    "/hubring.v1.Control/Join": _only(Role.WORKER, former=_KNOWN),
    "/hubring.v1.Control/Heartbeat": _only(Role.WORKER, former=_MEMBER),
    "/hubring.v1.Control/Connect": _only(Role.WORKER, Role.SHARD, former=_MEMBER),
    "/hubring.v1.Control/Leave": _only(Role.WORKER, former=_MEMBER),
    "/hubring.v1.Control/Plan": _only(Role.WORKER, former=_MEMBER),
    "/hubring.v1.Control/Rendezvous": _only(Role.WORKER, former=_MEMBER),
    "/hubring.v1.Control/Shards": _only(Role.WORKER, former=_MEMBER),
    "/hubring.v1.Control/Regroup": _only(Role.WORKER, former=_MEMBER),
    "/hubring.v1.Control/Clock": _only(Role.WORKER, Role.SHARD, Role.READER, Role.OPERATOR, former=_TIME),
    "/hubring.v1.Control/Status": _only(Role.READER, Role.OPERATOR, Role.WORKER),
    "/hubring.v1.Control/Checkpoint": _only(Role.OPERATOR),
    "/hubring.v1.Control/RotateToken": _only(Role.OPERATOR),
    "/hubring.v1.Control/RegisterShard": _only(Role.SHARD, former=_KNOWN),
    "/hubring.v1.Control/ShardHeartbeat": _only(Role.SHARD, former=_MEMBER),
    "/hubring.v1.ShardControl/SetView": _only(Role.HUB),
    "/hubring.v1.ShardControl/SetPlan": _only(Role.HUB),
    "/hubring.v1.ShardControl/Drain": _only(Role.HUB),
    "/hubring.v1.ShardControl/Fail": _only(Role.HUB),
    "/hubring.v1.ShardControl/Reset": _only(Role.HUB),
    "/hubring.v1.ShardControl/Save": _only(Role.HUB),
    "/hubring.v1.ShardControl/Stats": _only(Role.HUB),
    "/hubring.v1.ShardControl/Follow": _only(Role.HUB),
    "/hubring.v1.ShardControl/Replicate": _only(Role.HUB),
    "/hubring.v1.ShardControl/Promote": _only(Role.HUB),
    "/hubring.v1.Data/Exchange": _only(Role.MEMBER),
    "/grpc.health.v1.Health/Check": _PROBE,
    "/grpc.health.v1.Health/List": _PROBE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _only(
        Role.WORKER, Role.SHARD, Role.READER, Role.OPERATOR
    ),
}
"""By method, as gRPC names it."""
