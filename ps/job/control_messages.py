"""Buckets, slices and requests as protobuf messages: bounded, without control characters, and compared.

The service `Control` passes nothing else on. Names that come back to their sender, such as parameters,
are refused rather than changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from msgspec.structs import asdict

from hubring.protos import control_pb2 as pb
from hubring.ps.core.bounds import NAME_CHARACTERS, RejectionReason, clean
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import (
    DTYPE_BYTES,
    MAX_WORLD_SIZE,
    PROTOCOL,
    BucketSpec,
    ShardPlan,
    Slice,
    TensorSpec,
)
from hubring.ps.job.membership import Joiner

LEAST_BUCKET = 8
"""The smallest valid `--bucket-bytes`."""


def bucket_to_proto(bucket: BucketSpec) -> pb.BucketSpec:
    """Returns the bucket as a message."""
    return pb.BucketSpec(
        index=bucket.index,
        dtype=bucket.dtype,
        optimizer=bucket.optimizer,
        tensors=[pb.TensorSpec(name=tensor.name, shape=tensor.shape) for tensor in bucket.tensors],
        codec=bucket.codec,
    )


def bucket_from_proto(message: pb.BucketSpec) -> BucketSpec:
    """Returns the bucket of a message."""
    tensors = tuple(TensorSpec(tensor.name, tuple(tensor.shape)) for tensor in message.tensors)
    return BucketSpec(message.index, message.dtype, message.optimizer, tensors, message.codec)


def slice_to_proto(piece: Slice) -> pb.Slice:
    """Returns the slice as a message."""
    return pb.Slice(**asdict(piece))


@lru_cache(maxsize=1)
def slices_to_proto(plan: ShardPlan) -> pb.PlanReply:
    """Returns the slices as the answer to a worker. It is made once for all workers: do not change it."""
    return pb.PlanReply(slices=map(slice_to_proto, plan.slices))


def assignment(buckets: Iterable[BucketSpec], plan: ShardPlan, restore: Path | None) -> pb.ShardAssignment:
    """Returns the order to a shard to make its slices, zeroed or restored from a checkpoint."""
    return pb.ShardAssignment(
        buckets=map(bucket_to_proto, buckets),
        slices=slices_to_proto(plan).slices,
        restore=os.path.abspath(restore) if restore else "",  # a shard's working directory may differ
    )


def slice_from_proto(message: pb.Slice) -> Slice:
    """Returns the slice of a message."""
    return Slice(message.key, message.bucket, message.offset, message.numel, message.shard)


def model_difference(held: Sequence[BucketSpec], offered: Sequence[BucketSpec]) -> str | None:
    """Returns the first difference between two models, as a clause; None if they are equal."""
    if tuple(held) == tuple(offered):
        return None
    if _uncut(held) == _uncut(offered) and [one.numel for one in held] != [one.numel for one in offered]:
        return _cut(held)
    mine = [(bucket, tensor) for bucket in held for tensor in bucket.tensors]
    theirs = [(bucket, tensor) for bucket in offered for tensor in bucket.tensors]
    for (bucket, tensor), (other_bucket, other) in zip(mine, theirs, strict=False):
        if bucket.codec != other_bucket.codec:
            return f"expected {_compress(bucket)}, got {_compress(other_bucket)}"
        if (tensor, bucket.dtype) != (other, other_bucket.dtype):
            return f"expected {_parameter(tensor, bucket)}, got {_parameter(other, other_bucket)}"
        if bucket.optimizer != other_bucket.optimizer:
            return f"expected {_optimizer(bucket)}, got {_optimizer(other_bucket)}"
    return f"expected {len(mine)} parameters, got {len(theirs)}"


def _uncut(buckets: Sequence[BucketSpec]) -> list[BucketSpec]:
    """Returns one bucket per tensor, by name: equal for models that differ only in order and in buckets."""
    alone = [replace(bucket, index=0, tensors=(tensor,)) for bucket in buckets for tensor in bucket.tensors]
    return sorted(alone, key=lambda bucket: bucket.tensors[0].name)


def _cut(held: Sequence[BucketSpec]) -> str:
    """Returns the clause for the same tensors in buckets of other sizes.

    The `--bucket-bytes` that reproduces the held buckets is the size of the largest bucket with several
    tensors, or else of the smallest bucket.
    """
    several = [bucket for bucket in held if len(bucket.tensors) > 1]
    sizes = [bucket.numel * DTYPE_BYTES[bucket.dtype] for bucket in several or held]
    nbytes = max(sizes) if several else max(min(sizes), LEAST_BUCKET)
    return (
        f"the bucket sizes differ, for example by overlap=False or another device (--bucket-bytes {nbytes}"
        " on every worker gives the expected sizes)"
    )


def _compress(bucket: BucketSpec) -> str:
    return f"--compress {bucket.codec}" if bucket.codec else "no --compress"


def _parameter(tensor: TensorSpec, bucket: BucketSpec) -> str:
    return f"{tensor.name} {list(tensor.shape)} {bucket.dtype}"


def _optimizer(bucket: BucketSpec) -> str:
    return f"optimizer {bucket.optimizer}" if bucket.optimizer else "the worker's own optimizer (--aggregate)"


WORKER_TOKEN, SHARD_TOKEN = 32, 64
"""Characters of the token that names a worker process, and of the one that names a shard."""

PARAMETER_CHARACTERS = 1024
"""Maximum length of a parameter's name."""

MAX_PARAMETERS, MAX_DIMENSIONS, MAX_ELEMENTS = 1 << 16, 64, 1 << 47
"""Bounds of a model, and of each parameter's shape. So a whole model has less than 2**64 elements."""

MAX_ADDRESSES, ADDRESS_CHARACTERS = 8, 1024
"""Maximum number of addresses of a shard, one per transport, and length of each. A GPU's has about 400."""


NOTE_BYTES = 64 << 10
"""Maximum bytes of what a member of a ring tells the others."""


class RejectedRequest(ConfigError):
    """A request that exceeds a bound.

    Attributes:
        reason: What exceeds it.
    """

    def __init__(self, reason: RejectionReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def checked_joiner(request: pb.JoinRequest) -> Joiner:
    """Returns the worker that asks to join.

    Raises:
        ConfigError: The worker is of another version, or its request exceeds a bound.
    """
    _check_protocol(request.protocol, "worker")
    _check_token(request.token, WORKER_TOKEN)
    if request.world_size > MAX_WORLD_SIZE:
        raise RejectedRequest(
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
        local=request.local,
        rank=None if request.rank < 0 else request.rank,
        world_size=request.world_size or None,
        brings_shard=request.brings_shard,
    )


def checked_shard(request: pb.RegisterShardRequest, *, proves: bool) -> pb.RegisterShardRequest:
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
        raise RejectedRequest(
            "text", f"a shard with {len(request.addresses)} addresses; use at most {MAX_ADDRESSES} transports"
        )
    for transport, address in request.addresses.items():
        _check("transport", transport)
        _check("address", address, ADDRESS_CHARACTERS)
    if "grpc" not in request.addresses:
        raise RejectedRequest(
            "text", "a shard without a gRPC address; the coordinator needs one to control it"
        )
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


def checked_buckets(offered: Sequence[pb.BucketSpec]) -> tuple[BucketSpec, ...]:
    """Returns a worker's buckets.

    Raises:
        ConfigError: A name or a shape in them exceeds its bound, or they are too many.
    """
    if (count := max(len(offered), sum(len(bucket.tensors) for bucket in offered))) > MAX_PARAMETERS:
        raise RejectedRequest("model", f"{count} buckets or parameters; use at most {MAX_PARAMETERS}")
    specs = tuple(map(bucket_from_proto, offered))
    for spec in specs:
        for what, text in (("dtype", spec.dtype), ("optimizer", spec.optimizer), ("codec", spec.codec)):
            _check(what, text)
        for tensor in spec.tensors:
            _check("parameter name", tensor.name, PARAMETER_CHARACTERS)
            shape = tensor.shape
            if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or tensor.numel > MAX_ELEMENTS:
                raise RejectedRequest(
                    "model",
                    f"parameter {tensor.name} has the shape {clean(str(list(shape)))}; use at most"
                    f" {MAX_DIMENSIONS} dimensions, none negative, and at most {MAX_ELEMENTS} elements",
                )
    return specs


def _check(what: str, text: str, most: int = NAME_CHARACTERS) -> None:
    if len(text) > most:
        raise RejectedRequest(
            "text", f"the {what} has {len(text)} characters; use at most {most}: {clean(text, 60)}"
        )
    if not text.isprintable():
        raise RejectedRequest(
            "text", f"the {what} {clean(text)!r} has a control character; use printable text"
        )


def _check_token(token: str, characters: int) -> None:
    _check("token", token)
    if len(token) != characters:
        raise RejectedRequest("text", f"a token of {len(token)} characters; expected {characters}")


def _check_protocol(theirs: int, who: str) -> None:
    if theirs != PROTOCOL:
        raise ConfigError(
            f"the {who} uses protocol {theirs}, but this server uses protocol {PROTOCOL};"
            " install the same version of Hubring on both hosts"
        )


def checked_note(text: str) -> str:
    """Returns what a member of a ring tells the others.

    Raises:
        Rejected: It is too long.
    """
    if len(text.encode()) > NOTE_BYTES:
        raise RejectedRequest(
            "board", f"a note of {len(text)} characters is too long; send at most {NOTE_BYTES} bytes"
        )
    return text
