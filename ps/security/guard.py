"""Who may call which RPC: refuses calls whose secret does not fit, and adds the secret to a client's calls.

Every RPC of every service has a policy, and a guard refuses those without one.
"""

from __future__ import annotations

import hmac
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import wraps
from typing import Any, NamedTuple

import grpc

from hubring.ps.core.bounds import Rejections
from hubring.ps.core.types import MAX_WORLD_SIZE


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
        former: Why secrets from before a rotation are good enough; empty if they are not.
    """

    roles: frozenset[Role]
    former: str = ""


_KNOWN = "the service refuses processes that it does not know, so a process that waits may ask again"
_MEMBER = "each call also has an incarnation or a shard's token, which the service checks"
_TIME = "the reply is only the time"
_PROBE = "the reply is only what serves, and why not, and a probe must not end a server whose tokens rotate"


def _only(*roles: Role, former: str = "") -> Policy:
    return Policy(frozenset(roles), former)


def _same(service: str, methods: str, policy: Policy) -> Mapping[str, Policy]:
    return {f"/{service}/{method}": policy for method in methods.split()}


_CONTROL, _SHARD_CONTROL = "hubring.v1.Control", "hubring.v1.ShardControl"

POLICIES: Mapping[str, Policy] = {
    **_same(_CONTROL, "Join", _only(Role.WORKER, former=_KNOWN)),
    **_same(_CONTROL, "Heartbeat Leave Plan", _only(Role.WORKER, former=_MEMBER)),
    **_same(_CONTROL, "Rendezvous Shards Regroup Keep Kept", _only(Role.WORKER, former=_MEMBER)),
    **_same(_CONTROL, "RegisterShard", _only(Role.SHARD, former=_KNOWN)),
    **_same(_CONTROL, "ShardHeartbeat", _only(Role.SHARD, former=_MEMBER)),
    **_same(_CONTROL, "Connect", _only(Role.WORKER, Role.SHARD, former=_MEMBER)),
    **_same(_CONTROL, "Clock", _only(Role.WORKER, Role.SHARD, Role.READER, Role.OPERATOR, former=_TIME)),
    **_same(_CONTROL, "Status", _only(Role.READER, Role.OPERATOR, Role.WORKER)),
    **_same(_CONTROL, "Checkpoint RotateToken", _only(Role.OPERATOR)),
    **_same(_SHARD_CONTROL, "SetView SetPlan Drain Fail Reset Save Stats", _only(Role.HUB)),
    **_same(_SHARD_CONTROL, "Follow Replicate Promote", _only(Role.HUB)),
    **_same("hubring.v1.Data", "Exchange", _only(Role.MEMBER)),
    **_same(
        "grpc.health.v1.Health",
        "Check List",
        _only(Role.WORKER, Role.SHARD, Role.READER, Role.OPERATOR, former=_PROBE),
    ),
    **_same(
        "grpc.reflection.v1alpha.ServerReflection",
        "ServerReflectionInfo",
        _only(Role.WORKER, Role.SHARD, Role.READER, Role.OPERATOR),
    ),
}
"""By method, as gRPC names it."""


log = logging.getLogger(__name__)

HEADER = "authorization"
SCHEME = "Bearer "

MOST_FORMER = 100
"""Rotations that a server remembers. A member whose secret is older has to restart."""

MOST_ASKED = 4 * MAX_WORLD_SIZE
"""Processes that a server remembers while they wait to join: workers and shards, and those of a next job."""


class Guard:
    """The secrets of one server.

    Args:
        secrets: The secret of each role that this server knows.
        former: The secrets before each rotation so far.

    Attributes:
        known: The secrets that prove a client, also former ones: members stay, and others learn the reason.
    """

    def __init__(self, secrets: Mapping[Role, str], former: Sequence[Mapping[Role, str]] = ()) -> None:
        self.former: deque[Mapping[Role, str]] = deque(former, maxlen=MOST_FORMER)
        self._asked: dict[str, None] = {}
        """The last processes that asked to join with a secret that was current."""
        self._use(secrets)

    def rotate(self, secrets: Mapping[Role, str]) -> None:
        """Replaces the secrets. Members that joined with earlier ones stay."""
        self.former.append(self._secrets)
        self._use(secrets)

    def _use(self, secrets: Mapping[Role, str]) -> None:
        self._secrets = dict(secrets)
        self.known = frozenset(secret for each in (*self.former, secrets) for secret in each.values())

    def objection(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """Returns why a call is refused; empty if it is allowed."""
        policy = POLICIES.get(method)
        if policy is None:
            return f"{method} has no policy"
        secret = _secret(metadata)
        known = [self._secrets, *(self.former if policy.former else ())]
        if any(self._fits(secret, each, policy.roles) for each in known):
            return ""
        if not secret:
            return "the call has no token"
        if self._fits(secret, self._secrets, frozenset(Role)):
            return "the token is for another role"
        return self._expired(secret) or "the token is not this server's"

    def expired_for(self, process: str, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """Returns why a process that asks to join is refused; empty if its secret has not expired for it.

        A secret from before a rotation is good enough for a process that asked before the rotation.

        Args:
            process: Unique per process; only the process and this server know it.
            metadata: Of a call without an `objection`.
        """
        expired = self._expired(_secret(metadata))
        if not expired:
            self._asked[process] = None
            if len(self._asked) > MOST_ASKED:
                del self._asked[next(iter(self._asked))]
        return "" if process in self._asked else expired

    def _expired(self, secret: str) -> str:
        if any(self._fits(secret, each, frozenset(Role)) for each in self.former):
            return "the token has expired, because the server's tokens were rotated"
        return ""

    @staticmethod
    def _fits(secret: str, secrets: Mapping[Role, str], roles: frozenset[Role]) -> bool:
        found = [
            hmac.compare_digest(secret.encode(), secrets[role].encode()) for role in roles & secrets.keys()
        ]
        return any(found)


def _secret(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    given = next((str(value) for key, value in metadata if key == HEADER), "")
    return given.removeprefix(SCHEME)


def in_threads(behavior: Callable[..., Any], threads: ThreadPoolExecutor) -> Callable[..., Any]:
    """Returns a behavior of a gRPC server that runs in these threads instead of the server's."""

    @wraps(behavior)
    def run(*arguments: Any) -> Any:
        return behavior(*arguments)

    run.experimental_thread_pool = threads  # type: ignore[attr-defined]
    return run


class ThreadGuard(grpc.ServerInterceptor):
    """Guards a server with threads; counts and logs refused calls."""

    def __init__(self, guard: Guard, rejections: Rejections) -> None:
        self._guard = guard
        self._rejections = rejections

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        objection = self._guard.objection(call.method, call.invocation_metadata)
        handler = continuation(call)
        if not objection or handler is None:
            return handler
        self._rejections.add("token", log, f"refused a call of {call.method}: {objection}")

        def refuse(_: Any, context: grpc.ServicerContext) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, objection)

        return grpc.stream_stream_rpc_method_handler(refuse)  # does not wait for the request


class AsyncGuard(grpc.aio.ServerInterceptor):
    """Guards a server of an event loop; counts and logs refused calls."""

    def __init__(self, guard: Guard, rejections: Rejections) -> None:
        self._guard = guard
        self._rejections = rejections

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        objection = self._guard.objection(call.method, call.invocation_metadata)
        handler = await continuation(call)
        if not objection or handler is None:
            return handler
        self._rejections.add("token", log, f"refused a call of {call.method}: {objection}")

        async def refuse(_: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, objection)

        return grpc.stream_stream_rpc_method_handler(refuse)  # does not wait for the request


class _Details(NamedTuple):
    """What gRPC asks of a call's details."""

    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Signs the calls of a channel for threads."""

    def __init__(self, secret: str) -> None:
        self._header = (HEADER, SCHEME + secret)

    def _sign(self, continuation: Any, details: Any, request: Any) -> Any:
        given = {name: getattr(details, name) for name in _Details._fields}  # all that gRPC promises of them
        given["metadata"] = [*(details.metadata or ()), self._header]
        return continuation(_Details(**given), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _sign  # type: ignore[assignment]


class AsyncBearer(grpc.aio.UnaryUnaryClientInterceptor):
    """Signs the calls of a channel of an event loop."""

    def __init__(self, secret: str) -> None:
        self._header = (HEADER, SCHEME + secret)

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()), self._header)
        return await continuation(client_call_details._replace(metadata=metadata), request)
