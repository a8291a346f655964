"""Shared types: tensors, buckets, slices, plans, members, and the names of gradient codecs.

A codec's argument follows a colon:

    bf16, fp16       two bytes per element
    int8             one byte per element, and a scale per block
    sign             one bit per element, and a magnitude per block
    topk:0.01        the largest 1 % of the elements, and their indices
    powersgd:4       two factors of rank 4 for each matrix

This module does not import torch, so that settings can be checked without it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from msgspec import Struct

from hubring.ps.core.errors import ConfigError

PROTOCOL = 18
"""Protocol version. Increase it when an older peer could misunderstand a newer one."""

MAX_WORLD_SIZE = 4096
"""Maximum number of workers of a job. A join takes time and memory in proportion to it."""

Hyper = Mapping[str, float]
"""Hyperparameters of one parameter group as numbers: lr, momentum, beta1; nesterov as 0 or 1."""


class HyperTable(NamedTuple):
    """The hyperparameters of parameters that differ in them.

    Attributes:
        rows: Those that occur, at least two.
        row_of: The index in `rows` of each parameter's, in order.
    """

    rows: tuple[Hyper, ...]
    row_of: tuple[int, ...]

    @classmethod
    def of(cls, hypers: Iterable[Hyper]) -> Hyper | HyperTable:
        """Returns the hyperparameters of some parameters, at least one: no table if all are alike."""
        rows: dict[tuple[float, ...], tuple[int, Hyper]] = {}
        row_of = tuple(rows.setdefault(tuple(one.values()), (len(rows), one))[0] for one in hypers)
        held = tuple(hyper for _, hyper in rows.values())
        return cls(held, row_of) if len(held) > 1 else held[0]

    def part(self, parameters: slice) -> Hyper | HyperTable:
        """Returns those of some of the parameters."""
        row_of = self.row_of[parameters]
        return self if len(row_of) == len(self.row_of) else self.of(map(self.rows.__getitem__, row_of))


StepHyper = Hyper | HyperTable
"""The hyperparameters of one step of a bucket or a slice."""

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


INCARNATION_BYTES = 24
"""Bytes of an incarnation in a message, the highest first."""


def new_incarnation(number: int) -> int:
    """Returns the incarnation of a job's join with this number: the number, and 128 random bits below it.

    So incarnations are in the order of the joins, and no peer can guess one.
    """
    return number << 128 | secrets.randbits(128)


def incarnation_to_wire(incarnation: int) -> bytes:
    """Returns an incarnation as the bytes of a message."""
    return incarnation.to_bytes(INCARNATION_BYTES)


def incarnation_from_wire(data: bytes) -> int:
    """Returns the incarnation in a message's bytes; 0 (never a valid one) if the length is wrong."""
    return int.from_bytes(data) if len(data) == INCARNATION_BYTES else 0


class Sender(NamedTuple):
    """A sender's rank and incarnation. A higher incarnation fences the lower ones.

    Only the sender and the server's processes know an incarnation, so it also proves who sends. Logs show its
    number.
    """

    rank: int
    incarnation: int

    @property
    def number(self) -> int:
        """The number of the sender's join."""
        return self.incarnation >> 128


class DtypeAndShape(NamedTuple):
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

    All have one dtype. `tensors` are stored in this order without gaps. `optimizer` is a name from
    `hubring.ps.optim.hyperparameters.ALLOWED`; empty if the hub only averages and the worker steps. `codec`
    compresses the gradients; its names are in `hubring.ps.core.types`; empty for no compression.
    """

    index: int
    dtype: str
    optimizer: str
    tensors: tuple[TensorSpec, ...]
    codec: str = ""

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


class Slice(Struct, frozen=True, gc=False):
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


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that takes part, with its host and process id."""

    rank: int
    incarnation: int
    host: str = ""
    pid: int = 0

    @property
    def sender(self) -> Sender:
        """The sender of the worker's messages."""
        return Sender(self.rank, self.incarnation)

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


PLAIN_CODECS = ("bf16", "fp16", "int8", "sign")
"""Codecs without an argument."""

MAX_FACTOR_RANK = 256
"""Highest rank of PowerSGD factors. Above it the factors are no smaller than most matrices."""

_KNOWN_CODECS = f"{', '.join(PLAIN_CODECS)}, topk:FRACTION as in topk:0.01, powersgd:RANK as in powersgd:4"
_CODEC_PATTERN = re.compile(r"(?P<kind>topk|powersgd):(?P<argument>[0-9]{1,12}|[0-9]{0,3}\.[0-9]{1,12})")


class CodecSpec(NamedTuple):
    """A codec's kind and argument: a fraction for `topk`, a rank for `powersgd`, otherwise 0."""

    kind: str
    argument: float = 0.0


def parse_codec(text: str) -> CodecSpec:
    """Parses a codec's name.

    Raises:
        ConfigError: The codec is unknown, or its argument is out of range. Names the valid values.
    """
    if text in PLAIN_CODECS:
        return CodecSpec(text)
    match = _CODEC_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"compression {text!r}: unknown codec; use one of {_KNOWN_CODECS}")
    kind, argument = match["kind"], float(match["argument"])
    if kind == "topk" and not 0 < argument < 1:
        raise ConfigError(
            f"compression {text!r}: topk takes the fraction of elements to send, above 0 and below 1;"
            " topk:0.01 is typical"
        )
    if kind == "powersgd" and not (argument.is_integer() and 1 <= argument <= MAX_FACTOR_RANK):
        raise ConfigError(
            f"compression {text!r}: powersgd takes the factors' rank, a whole number from 1 to"
            f" {MAX_FACTOR_RANK}; powersgd:4 is typical"
        )
    return CodecSpec(kind, argument)
