"""Shared types: tensors, buckets, slices, plans, members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

PROTOCOL = 7
"""Protocol version. Increase it when an older peer could misunderstand a newer one."""

Hyper = Mapping[str, float]
"""Hyperparameters of one parameter group as numbers: lr, momentum, beta1; nesterov as 0 or 1."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The dtypes that can be sent, by torch's name, with the bytes of one element."""


class Sender(NamedTuple):
    """A sender's rank and incarnation. A higher incarnation fences the lower ones."""

    rank: int
    incarnation: int


class Layout(NamedTuple):
    """A tensor's dtype (by torch's name) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter's name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A flat range of parameters that are exchanged together.

    All have one dtype and one parameter group. `tensors` are stored in this order without
    gaps. `optimizer` is a name from `hubring.ps.optim.hyperparameters.ALLOWED`; empty if
    the hub only averages and the worker steps. `codec` compresses the gradients; its names
    are in `hubring.ps.core.codecs`; empty for no compression.
    """

    index: int
    dtype: str
    group: int
    optimizer: str
    tensors: tuple[TensorSpec, ...]
    codec: str = ""

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous part of one bucket, stored on one shard under one key. Offset and numel count elements."""

    key: int
    bucket: int
    offset: int
    numel: int
    shard: int


class Slicing(NamedTuple):
    """How to cut a model: slices of at most `slice_bytes`, on `shards` shards; 0 shards for all."""

    slice_bytes: int
    shards: int = 0


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The slices of all buckets and their shards. Keys are 0, 1, 2, ... in bucket order."""

    slices: tuple[Slice, ...]

    def of_bucket(self, bucket: int) -> list[Slice]:
        return [piece for piece in self.slices if piece.bucket == bucket]

    def of_shard(self, shard: int) -> list[Slice]:
        return [piece for piece in self.slices if piece.shard == shard]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that takes part, with its host and process id."""

    rank: int
    incarnation: int
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host} pid {self.pid})"


@dataclass(frozen=True, slots=True)
class View:
    """The members as of one epoch, in rank order."""

    epoch: int = 0
    members: tuple[Member, ...] = ()
    finished: str = ""
    """In lockstep modes, the error for means of later steps, since a worker finished; empty before."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)
