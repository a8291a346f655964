"""What workers and shards sent, bounded and without control characters.

The service `Control` passes nothing else on. Names that come back to their sender, such as parameters, are
refused rather than changed.
"""

from __future__ import annotations

from collections.abc import Iterable

from hubring.protos import control_pb2 as pb
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.peer_text import NAME, clean
from hubring.ps.core.rejections import Reason
from hubring.ps.core.types import MAX_WORLD_SIZE, PROTOCOL, BucketSpec
from hubring.ps.job.joiner import Joiner
from hubring.ps.job.plan_protos import bucket_from_proto

WORKER_TOKEN, SHARD_TOKEN = 32, 64
"""Characters of the token that names a worker process, and of the one that names a shard."""

PARAMETER_CHARACTERS = 1024
"""Maximum length of a parameter's name."""

MAX_ADDRESSES = 8
"""Maximum number of addresses of a shard, one per transport."""


NOTE_BYTES = 64 << 10
"""Maximum bytes of what a member of a ring tells the others."""


class Rejected(ConfigError):
    """A request that exceeds a bound.

    Attributes:
        reason: What exceeds it.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def joiner(request: pb.JoinRequest) -> Joiner:
    """Returns the worker that asks to join.

    Raises:
        ConfigError: The worker is of another version, or its request exceeds a bound.
    """
    _check_protocol(request.protocol, "worker")
    _check_token(request.token, WORKER_TOKEN)
    if request.world_size > MAX_WORLD_SIZE:
        raise Rejected(
            "world size",
            f"this worker's launcher starts {request.world_size} workers, but a job has at most"
            f" {MAX_WORLD_SIZE}; start fewer workers",
        )
    return Joiner(
        token=request.token,
        job=clean(request.job),
        topology=clean(request.topology),
        host=clean(request.host),
        pid=request.pid,
        min_workers=request.min_workers,
        rank=None if request.rank < 0 else request.rank,
        world_size=request.world_size or None,
        brings_shard=request.brings_shard,
    )


def shard(request: pb.RegisterShardRequest, *, proves: bool) -> pb.RegisterShardRequest:
    """Returns the request of a shard that registers.

    Args:
        request: As it arrived.
        proves: Whether the shard must prove itself to workers, with a certificate.

    Raises:
        ConfigError: The shard is of another version, has no certificate, or its request exceeds a bound.
    """
    _check_protocol(request.protocol, "shard")
    _check_token(request.token, SHARD_TOKEN)
    if len(request.addresses) > MAX_ADDRESSES:
        raise Rejected(
            "text", f"a shard with {len(request.addresses)} addresses; use at most {MAX_ADDRESSES} transports"
        )
    for transport, address in request.addresses.items():
        _check("transport", transport)
        _check("address", address)
    if "grpc" not in request.addresses:
        raise Rejected("text", "a shard without a gRPC address; the coordinator needs one to control it")
    _check("host_id", request.host_id)
    if proves and not request.door.certificate:
        raise ConfigError(
            f"the shard on {clean(request.host)} proves nothing to workers, as shards of this server must;"
            " start it without --insecure"
        )
    checked = pb.RegisterShardRequest()
    checked.CopyFrom(request)
    checked.host = clean(request.host)
    return checked


def buckets(offered: Iterable[pb.BucketSpec]) -> tuple[BucketSpec, ...]:
    """Returns a worker's buckets.

    Raises:
        ConfigError: A name in them exceeds its bound.
    """
    specs = tuple(map(bucket_from_proto, offered))
    for spec in specs:
        for what, text in (("dtype", spec.dtype), ("optimizer", spec.optimizer), ("codec", spec.codec)):
            _check(what, text)
        for tensor in spec.tensors:
            _check("parameter name", tensor.name, PARAMETER_CHARACTERS)
    return specs


def _check(what: str, text: str, most: int = NAME) -> None:
    if len(text) > most:
        raise Rejected("text", f"a {what} of {len(text)} characters; use at most {most}: {clean(text, 60)}")
    if not text.isprintable():
        raise Rejected("text", f"the {what} {clean(text)!r} has a control character; use printable text")


def _check_token(token: str, characters: int) -> None:
    _check("token", token)
    if len(token) != characters:
        raise Rejected("text", f"a token of {len(token)} characters; expected {characters}")


def _check_protocol(theirs: int, who: str) -> None:
    if theirs != PROTOCOL:
        raise ConfigError(
            f"the {who} uses protocol {theirs}, but this server uses protocol {PROTOCOL};"
            " install the same version of Hubring on both hosts"
        )


def note(text: str) -> str:
    """Returns what a member of a ring tells the others.

    Raises:
        Rejected: It is too long.
    """
    if len(text.encode()) > NOTE_BYTES:
        raise Rejected(
            "board", f"a note of {len(text)} characters is too long; send at most {NOTE_BYTES} bytes"
        )
    return text
