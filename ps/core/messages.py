"""The messages between workers and shards, without their encoding.

A shard answers each request with exactly one reply, at once or later. Tensors are flat
(1-D), except in collectives. They belong to the sender until the reply arrives.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import DtypeAndShape, Sender, StepHyper

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ticket = object
"""What the shard loop needs to send a reply. The store only returns it."""


class Collective(enum.IntEnum):
    """Collective operations. The numbers are those of data.proto."""

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
    """How contributions are reduced. The numbers are those of data.proto."""

    SUM = 1
    AVERAGE = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    ADASUM = 6


class Code(enum.IntEnum):
    """Why a request was refused. The numbers are those of data.proto."""

    FENCED = 1
    UNKNOWN_KEY = 2
    WRONG_SIZE = 3
    OUT_OF_ORDER = 4
    MISMATCH = 5
    JOB_FAILED = 6
    BAD_REQUEST = 7
    NOT_FINITE = 8
    RESEND = 9
    OTHER_STREAM = 10


NO_REQUEST = 2**64 - 1
"""The number of probes, and of the reply to a request whose number is unreadable."""


@dataclass(slots=True)
class Coded:
    """A flat tensor encoded by a codec of `hubring.ps.compression.compressor`.

    `payload` is flat uint8. `numel` and `dtype` are those of the decoded tensor.
    """

    codec: str
    payload: Tensor
    numel: int
    dtype: torch.dtype


@dataclass(slots=True)
class KeyRequest:
    """A worker's request about one key."""

    sender: Sender
    key: int


@dataclass(slots=True)
class Init(KeyRequest):
    """First values for a key, and the optimizer's first state, from rank 0. Ignored if the key has values."""

    values: Tensor
    state: OptimizerState | None = None


@dataclass(slots=True)
class Push(KeyRequest):
    """A gradient. The reply brings the parameters once the policy lets the sender read.

    `clock` is the number of steps that the sender completed on this key, from the key's
    last `Values`. (sender, key, clock) identifies the push.

    `absent` are the slice's parameters without a gradient on this sender, as ascending indices into
    `parameter_parts`. The gradient holds zeros for them.

    `covers` are other workers in bsp whose gradients of this clock are in `gradient`, a sum. The push counts
    for all of them, and `absent` is what all of them lack. If a covered worker also pushes its own gradient,
    that is not added, unless the sender is lost before the round closes.

    `weight` is the gradient's in the round's mean, at least 0; None counts as 1.
    """

    clock: int
    gradient: Tensor | Coded
    hyper: StepHyper = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    covers: tuple[Sender, ...] = ()
    weight: float | None = None


@dataclass(slots=True)
class Pull(KeyRequest):
    """Reads a key's parameters. Waits only until the key has been initialised."""


@dataclass(slots=True)
class ScriptWrite(KeyRequest):
    """The script changed something of this key between two steps.

    `clock` is that of the sender's next push. In lockstep modes that push's round applies the write
    before its step, and all contributors must then hold the same. In the other modes it is applied at
    once. The reply, a `CollectiveResult`, comes at once; the sender waits for it before it pushes.

    `sequence` increases with each of the sender's writes, so a late retry does not replace a newer write.
    """

    clock: int
    sequence: int


@dataclass(slots=True)
class WriteParameters(ScriptWrite):
    """The script changed parameters, which the modes without lockstep refuse while other workers are live."""

    values: Tensor


@dataclass(slots=True)
class WriteState(ScriptWrite):
    """The script replaced the optimizer's state; a state without tensors makes the optimizer fresh."""

    state: OptimizerState


@dataclass(slots=True)
class ReadState(KeyRequest):
    """Reads the optimizer's state of a key, or the sender's own `WriteState` if its round is still open.

    Answered at once.
    """


@dataclass(slots=True)
class Probe:
    """Asks which of these requests, by number, the shard does not have. Answered at once with `Missing`."""

    sender: Sender
    requests: tuple[int, ...]


@dataclass(slots=True)
class ClosedRound:
    """A round that a primary closed; its standby applies the same step.

    `total` divided by `count` is the mean of the gradients: their sum, or the mean of compressed gradients.
    `version` is the key's before the update. `contributors` are in rank order, with covered workers.
    `absent` is as in `Values`.
    `excused` are the contributors that agree with whatever other scripts wrote before the round.
    """

    key: int
    version: int
    total: Tensor
    count: int
    hyper: StepHyper
    contributors: tuple[Contributor, ...]
    absent: tuple[int, ...] = ()
    excused: tuple[int, ...] = ()


class Contributor(NamedTuple):
    """A worker whose gradient is in a closed round, with its push's clock and staleness."""

    rank: int
    clock: int
    staleness: int


NO_KEY = 2**32 - 1
"""The key of a `Transfer` of what belongs to no key."""


@dataclass(slots=True)
class Transfer:
    """A part of a primary's state, for a standby that follows it from the middle of a job.

    `tensors` are named as `hubring.ps.store.transfer` reads them. "facts" holds the rest, as JSON in uint8.
    """

    key: int
    tensors: Mapping[str, Tensor]


class StoreCommand(enum.IntEnum):
    """The coordinator's calls that change a store. The numbers are those of data.proto."""

    CONFIRM = 0
    SET_VIEW = 1
    SET_PLAN = 2
    DRAIN = 3
    FAIL = 4
    RESET = 5


@dataclass(slots=True)
class CoordinatorCall:
    """A call of the coordinator that a primary forwards; `message` is the call's, in protobuf's encoding.

    A CONFIRM changes nothing. Its acknowledgement proves that the standby still follows.
    """

    command: StoreCommand
    message: bytes = b""


@dataclass(slots=True)
class Forwarded:
    """A change that a primary forwards to its standby.

    The standby acknowledges it with an empty `CollectiveResult`. `stream` is the secret of their stream.
    The changes of a stream have consecutive numbers.
    """

    stream: bytes
    change: Change


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective. The shard matches the ranks' calls by `name`.

    `root` is the source of a broadcast, scatter or transfer, and the destination of a
    reduce or gather. `ranks` are the members in ascending order; empty for all ranks.
    `splits` are the rows for each member in an alltoall, and the ranks of a new group.
    `layouts` are those of the tensors that the rank sends. In a broadcast from another
    root they are the expected layouts, and may be empty.
    """

    collective: Collective
    name: str
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    ranks: tuple[int, ...] = ()
    splits: tuple[int, ...] = ()
    layouts: tuple[DtypeAndShape, ...] = ()


@dataclass(slots=True)
class Contribute:
    """One rank's part of a collective: its call, and its tensors of any shape.

    `sequence` increases with each of this sender's calls, which distinguishes a retry from
    the next call. The sender has received its replies to all calls up to `settled`, and to
    the later calls in `closed`, and will not ask for them again.
    """

    sender: Sender
    sequence: int
    call: Call
    tensors: tuple[Tensor, ...] = ()
    settled: int = 0
    closed: tuple[int, ...] = ()


@dataclass(slots=True)
class Values:
    """A key's parameters, or the mean gradient in aggregate-only jobs.

    `values` is None if they have landed in the reader's memory.

    `stable` promises that the shard does not change these bytes until the reader has
    pushed again. A transport can then send them without a copy, or map them in place.
    This holds if every update needs a gradient of every live worker: only in bsp.

    `absent` are the slice's parameters without a gradient on every contributor of the answered push's
    round. A hub that steps left their values and optimizer state unchanged.

    `saved`: a checkpoint has this version, so the worker sends the server its own state after this step.
    """

    key: int
    values: Tensor | Coded | None
    clock: int
    version: int
    staleness: int = 0
    drain: bool = False
    stable: bool = False
    absent: tuple[int, ...] = ()
    saved: bool = False


@dataclass(slots=True)
class StateReply:
    """The optimizer's state of a key; without tensors before the first step."""

    key: int
    version: int
    state: OptimizerState


@dataclass(slots=True)
class CollectiveResult:
    """A collective's result for this rank. Empty for a barrier, and for the reply to `Init` and writes."""

    tensors: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Missing:
    """The requests of a `Probe` that wait for no reply: lost, or answered with a reply that may be lost."""

    requests: tuple[int, ...]


@dataclass(slots=True)
class Refusal:
    """The request cannot be served. `text` names the value, the allowed values and the fix."""

    code: Code
    text: str


Write = WriteParameters | WriteState
Request = Init | Push | Pull | Contribute | Write | ReadState
Change = ClosedRound | CoordinatorCall | Transfer | Init | Write | Contribute
Reply = Values | StateReply | CollectiveResult | Refusal | Missing


class Delivery(NamedTuple):
    """A reply, and the ticket of its request."""

    ticket: Ticket
    reply: Reply
