"""Buckets and slices as the control plane spells them, and how two models differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hubring.protos import control_pb2 as pb
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, Slice, TensorSpec

LEAST_BUCKET = 8
"""Bytes: less is no setting."""


def bucket_to_proto(bucket: BucketSpec) -> pb.BucketSpec:
    """The bucket as a message."""
    return pb.BucketSpec(
        index=bucket.index,
        dtype=bucket.dtype,
        group=bucket.group,
        optimizer=bucket.optimizer,
        tensors=[pb.TensorSpec(name=tensor.name, shape=tensor.shape) for tensor in bucket.tensors],
        codec=bucket.codec,
    )


def bucket_from_proto(message: pb.BucketSpec) -> BucketSpec:
    """The bucket that a message spells."""
    tensors = tuple(TensorSpec(tensor.name, tuple(tensor.shape)) for tensor in message.tensors)
    return BucketSpec(message.index, message.dtype, message.group, message.optimizer, tensors, message.codec)


def slice_to_proto(piece: Slice) -> pb.Slice:
    """The slice as a message."""
    return pb.Slice(
        key=piece.key, bucket=piece.bucket, offset=piece.offset, numel=piece.numel, shard=piece.shard
    )


def slice_from_proto(message: pb.Slice) -> Slice:
    """The slice that a message spells."""
    return Slice(message.key, message.bucket, message.offset, message.numel, message.shard)


def difference(held: Sequence[BucketSpec], offered: Sequence[BucketSpec]) -> str | None:
    """The first thing in which two models differ, as a clause; None if nothing."""
    if _uncut(held) == _uncut(offered):
        return None if tuple(held) == tuple(offered) else _recut(held)
    mine = [(bucket, tensor) for bucket in held for tensor in bucket.tensors]
    theirs = [(bucket, tensor) for bucket in offered for tensor in bucket.tensors]
    for (bucket, tensor), (other_bucket, other) in zip(mine, theirs, strict=False):
        if bucket.codec != other_bucket.codec:
            return f"--compress {other_bucket.codec or 'not given'} where it is {bucket.codec or 'not given'}"
        if (tensor, bucket.dtype) != (other, other_bucket.dtype):
            return f"{_spell(other, other_bucket)} where {_spell(tensor, bucket)} is held"
        if bucket.optimizer != other_bucket.optimizer:
            return f"optimizer {_steps(other_bucket)} where {_steps(bucket)} is used"
    if len(mine) != len(theirs):
        return f"{len(theirs)} parameters where {len(mine)} are held"
    return "other parameter groups: give every worker the same"


def _uncut(buckets: Sequence[BucketSpec]) -> list[BucketSpec]:
    """A bucket a tensor, those of one kind in their order: alike for all that differ by their cuts alone."""
    alone = [replace(bucket, index=0, tensors=(tensor,)) for bucket in buckets for tensor in bucket.tensors]
    return sorted(alone, key=lambda bucket: (bucket.group, bucket.dtype))


def _recut(held: Sequence[BucketSpec]) -> str:
    """What cuts buckets as these are: a bound of the largest with several tensors, else of the smallest."""
    several = [bucket for bucket in held if len(bucket.tensors) > 1]
    sizes = [bucket.numel * DTYPE_BYTES[bucket.dtype] for bucket in several or held]
    nbytes = max(sizes) if several else max(min(sizes), LEAST_BUCKET)
    return (
        f"other buckets, as overlap=False or another device has them (--bucket-bytes {nbytes}, on every"
        " worker, makes those that are held)"
    )


def _spell(tensor: TensorSpec, bucket: BucketSpec) -> str:
    return f"{tensor.name} {list(tensor.shape)} {bucket.dtype}"


def _steps(bucket: BucketSpec) -> str:
    return bucket.optimizer or "of the worker's own (--aggregate)"
