"""Buckets and slices as protobuf messages, and how two models differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hubring.protos import control_pb2 as pb
from hubring.ps.core.types import DTYPE_BYTES, BucketSpec, Slice, TensorSpec

LEAST_BUCKET = 8
"""The smallest valid `--bucket-bytes`."""


def bucket_to_proto(bucket: BucketSpec) -> pb.BucketSpec:
    """Returns the bucket as a message."""
    return pb.BucketSpec(
        index=bucket.index,
        dtype=bucket.dtype,
        group=bucket.group,
        optimizer=bucket.optimizer,
        tensors=[pb.TensorSpec(name=tensor.name, shape=tensor.shape) for tensor in bucket.tensors],
        codec=bucket.codec,
    )


def bucket_from_proto(message: pb.BucketSpec) -> BucketSpec:
    """Returns the bucket of a message."""
    tensors = tuple(TensorSpec(tensor.name, tuple(tensor.shape)) for tensor in message.tensors)
    return BucketSpec(message.index, message.dtype, message.group, message.optimizer, tensors, message.codec)


def slice_to_proto(piece: Slice) -> pb.Slice:
    """Returns the slice as a message."""
    return pb.Slice(
        key=piece.key, bucket=piece.bucket, offset=piece.offset, numel=piece.numel, shard=piece.shard
    )


def slice_from_proto(message: pb.Slice) -> Slice:
    """Returns the slice of a message."""
    return Slice(message.key, message.bucket, message.offset, message.numel, message.shard)


def difference(held: Sequence[BucketSpec], offered: Sequence[BucketSpec]) -> str | None:
    """Returns the first difference between two models, as a clause; None if they are equal."""
    if _uncut(held) == _uncut(offered):
        return None if tuple(held) == tuple(offered) else _recut(held)
    mine = [(bucket, tensor) for bucket in held for tensor in bucket.tensors]
    theirs = [(bucket, tensor) for bucket in offered for tensor in bucket.tensors]
    for (bucket, tensor), (other_bucket, other) in zip(mine, theirs, strict=False):
        if bucket.codec != other_bucket.codec:
            return f"expected {_compress(bucket)}, got {_compress(other_bucket)}"
        if (tensor, bucket.dtype) != (other, other_bucket.dtype):
            return f"expected {_parameter(tensor, bucket)}, got {_parameter(other, other_bucket)}"
        if bucket.optimizer != other_bucket.optimizer:
            return f"expected {_optimizer(bucket)}, got {_optimizer(other_bucket)}"
    if len(mine) != len(theirs):
        return f"expected {len(mine)} parameters, got {len(theirs)}"
    return "the parameter groups differ"


def _uncut(buckets: Sequence[BucketSpec]) -> list[BucketSpec]:
    """Returns one bucket per tensor, grouped by kind: equal for models that differ only in bucket sizes."""
    alone = [replace(bucket, index=0, tensors=(tensor,)) for bucket in buckets for tensor in bucket.tensors]
    return sorted(alone, key=lambda bucket: (bucket.group, bucket.dtype))


def _recut(held: Sequence[BucketSpec]) -> str:
    """Returns the clause for different bucket sizes, with a `--bucket-bytes` that reproduces the held ones.

    The value is the size of the largest bucket with several tensors, or else of the smallest bucket.
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
