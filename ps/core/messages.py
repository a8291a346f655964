"""What workers and shards say to each other, as the rules see it.

A worker's request is answered by exactly one reply, at once or later.
Tensors are flat (1-D) but in collectives; they belong to whoever sent them
until the reply is there.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hubring.ps.core.types import Hyper, Layout, Sender

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ticket = Hashable
"""What the shard loop needs to send a reply on its way; the rules only hand it back."""


class Collective(enum.IntEnum):
    """Operations that ranks perform together; numbers as in data.proto."""

    ALLREDUCE = 1
    BROADCAST = 2
    ALLGATHER = 3
    BARRIER = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALLTOALL = 9
    TRANSFER = 10
    GROUP = 11
    JOIN = 12


class ReduceOp(enum.IntEnum):
    """How contributions become one; numbers as in data.proto."""

    SUM = 1
    AVERAGE = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    ADASUM = 6


class Code(enum.IntEnum):
    """Why a request was refused; numbers as in data.proto."""

    FENCED = 1
    UNKNOWN_KEY = 2
    WRONG_SIZE = 3
    OUT_OF_ORDER = 4
    MISMATCH = 5
    JOB_FAILED = 6
    BAD_REQUEST = 7
    NOT_FINITE = 8


@dataclass(slots=True)
class Coded:
    """A flat tensor as a codec of `hubring.ps.compression.compressor` wrote it.

    `payload` is flat uint8; `numel` and `dtype` are those of the tensor that it
    decodes to.
    """

    codec: str
    payload: Tensor
    numel: int
    dtype: torch.dtype


@dataclass(slots=True)
class Init:
    """First values for a key, from rank 0; ignored where the key has values already."""

    sender: Sender
    key: int
    values: Tensor


@dataclass(slots=True)
class Push:
    """A gradient; the reply brings the parameters once the policy lets the sender read.

    `clock` is the number of steps that the sender completed on this key, as the
    last `Values` for the key told it. (sender, key, clock) identifies the push.
    """

    sender: Sender
    key: int
    clock: int
    gradient: Tensor | Coded
    hyper: Hyper = field(default_factory=dict)


@dataclass(slots=True)
class Pull:
    """Asks for a key's parameters; waits only until the key has been initialised."""

    sender: Sender
    key: int


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank calls for; ranks of a call are matched by `name`.

    `root` is who gives in a broadcast, scatter or transfer, and who gets in a
    reduce or gather. `ranks` are the members, rising; empty: all ranks.
    `splits` are the rows for each member in an alltoall, and the ranks in a
    group's making. `layouts` are those of the tensors that the rank gives; in a
    broadcast from another root, those that it expects, if it says.
    """

    collective: Collective
    name: str
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    ranks: tuple[int, ...] = ()
    splits: tuple[int, ...] = ()
    layouts: tuple[Layout, ...] = ()


@dataclass(slots=True)
class Contribute:
    """One rank's part of a collective: its call, and its tensors of any shape.

    `sequence` rises with each of this sender's calls, so that a retry is told
    from the next one. The sender has had its replies to all calls up to
    `settled` and to those that are `closed` beyond it, and asks for none of
    them again.
    """

    sender: Sender
    sequence: int
    call: Call
    tensors: tuple[Tensor, ...] = ()
    settled: int = 0
    closed: tuple[int, ...] = ()


@dataclass(slots=True)
class Values:
    """A key's parameters, or in aggregate-only jobs the mean gradient.

    `values` is None where they have landed in the memory that the reader named.

    `stable` promises that the shard leaves these bytes alone until the reader
    has pushed again, so that a transport may send them without a copy, or show
    them where they lie. That is so where every update needs a gradient of every
    live worker: in bsp, and in no other mode.
    """

    key: int
    values: Tensor | Coded | None
    clock: int
    version: int
    staleness: int = 0
    drain: bool = False
    stable: bool = False


@dataclass(slots=True)
class Result:
    """What a collective gives this rank; nothing in a barrier, say."""

    tensors: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Refusal:
    """The request cannot be served; `text` names the value, what was allowed and the mend."""

    code: Code
    text: str


Request = Init | Push | Pull | Contribute
Reply = Values | Result | Refusal


class Delivery(NamedTuple):
    """A reply and the ticket of the request that it answers."""

    ticket: Ticket
    reply: Reply
