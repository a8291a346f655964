"""KVClient: sends a worker's requests to the shards and applies their replies.

Each push carries (sender, key, clock). The shards count a push once, even if
a broken connection makes the client send it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor

from hubring.ps.client.connections import ShardConnections
from hubring.ps.client.requests import Inflight, Settle
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, Fenced, HubringError, JobFailed, NonFinite
from hubring.ps.core.messages import (
    Code,
    Coded,
    CollectiveResult,
    Contribute,
    Init,
    Pull,
    ReadState,
    Refusal,
    Reply,
    Request,
    StateReply,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import Sender, StepHyper
from hubring.ps.core.work import Work
from hubring.ps.transport.encode import PushHeader, bytes_of, encode_request
from hubring.ps.transport.registry import Dial

_R = TypeVar("_R", bound=Reply)

Decode = Callable[[Coded], None]
"""Decodes a mean that arrived compressed. The payload is valid until the function returns.

Raises:
    HubringError: The codec is not the expected one.
"""

OnAbsent = Callable[[tuple[int, ...]], None]
"""Receives the positions of the parameters without a gradient on every contributor of a round."""

_ERRORS: dict[Code, type[HubringError]] = {
    Code.FENCED: Fenced,
    Code.JOB_FAILED: JobFailed,
    Code.NOT_FINITE: NonFinite,
    Code.MISMATCH: ConfigError,
    Code.BAD_REQUEST: ConfigError,
}
"""The error for each refusal that has its own. The others are errors of the protocol, not of settings."""


class AppliedPush(NamedTuple):
    """A push to an asynchronous hub, in the order of all pushes to its key.

    Attributes:
        key: The key.
        position: How many pushes were applied before it.
        version: How many pushes the parameters in the answer have.
    """

    key: int
    position: int
    version: int


class PushRecord:
    """Records a worker's pushes to an asynchronous hub.

    Args:
        key_of: Returns the key that has an element of a parameter, by the parameter's name.
    """

    def __init__(self, key_of: Callable[[str, int], int]) -> None:
        self.key_of = key_of
        self._answered: list[AppliedPush] = []

    def add(self, key: int, position: int, version: int) -> None:
        """Records a push that was answered."""
        self._answered.append(AppliedPush(key, position, version))

    def take(self) -> list[AppliedPush]:
        """Returns the pushes that were answered since the last call, in the order of the answers."""
        taken = self._answered[:]
        del self._answered[: len(taken)]  # not clear(): another thread adds to the end
        return taken


class PreparedPush(NamedTuple):
    """What all pushes of one gradient have in common: their header, and where each reply lands."""

    header: PushHeader
    into: Tensor
    landing: memoryview


class KVClient:
    """Push, pull and take part in collectives on a set of shards.

    Args:
        sender: The rank and incarnation that the coordinator assigned.
        shards: Number of shards.
        dial: Connects to a shard. Called in the connections' own thread, and again after a loss.
        bounded: Whether a `SendWindow` limits the unanswered bytes of each shard.
    """

    def __init__(self, sender: Sender, shards: int, dial: Dial, *, bounded: bool = True) -> None:
        self.sender = sender
        self.traffic = Traffic()
        self.draining = False
        """Whether the hub asks to stop after this step.

        In lockstep modes every rank sees it in the same step.
        """
        self.on_saved: Callable[[], None] = lambda: None
        """Called once a checkpoint has the version of an answer, before the answer's work is done."""
        self.saved = False
        """Whether a checkpoint has the version of key 0's last answer."""
        self.written = 0
        """How many slices `write_parameters` has replaced."""
        self.on_push: Callable[[int, int, int], None] | None = None
        """Called with each answered push: its key, the version that it was applied to, and the version of the
        answer. It runs in the thread that reads the reply."""
        self._clocks: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        """The version that this sender has read last, by key. It is always kept: `on_push` is set after the
        first pull."""
        self._numbers = itertools.count()
        self._writes = itertools.count()
        self._connections = ShardConnections(sender, shards, dial, self.traffic, bounded=bounded)
        # As there. A step calls them often, and another frame for each costs as much as they do.
        self.attend, self.batched = self._connections.attend, self._connections.batched
        self.held, self.wait_soon = self._connections.held, self._connections.wait_soon

    @property
    def completed(self) -> int:
        """The number of steps that this sender completed on every key that it has read."""
        return min(self._clocks.values(), default=0)

    def resume(self) -> int:
        """Continues at the step that this sender completed on every key; returns that step.

        The keys of a resumed asynchronous job can be some steps apart. A shard ignores the pushes that its
        checkpoint has.
        """
        step = self.completed
        self._clocks = dict.fromkeys(self._clocks, step)
        return step

    def wait_connected(self, timeout: float) -> None:
        """Returns once every shard is connected.

        Raises:
            ServerUnreachable: No transport reaches a shard, nor a standby that takes its place.
            HubringError: The server ended the job meanwhile.
            DeadlineExceeded: `timeout` seconds have passed.
        """
        self._connections.connected.wait(timeout)

    # Requests. Tensors belong to the client until the work is done.

    def init(
        self, shard: int, key: int, values: Tensor, work: Work, state: OptimizerState | None = None
    ) -> None:
        """Sets a key's first values and optimizer state. The shard ignores them if the key has values."""
        self._submit(
            shard, Init(self.sender, key, values, state), work, partial(_expected, shard, CollectiveResult)
        )

    def write_parameters(self, shard: int, key: int, values: Tensor, work: Work) -> None:
        """Replaces a key's parameters before the next step. Wait for `work` before the next push."""
        self.written += 1
        write = WriteParameters(self.sender, key, self.clock(key), next(self._writes), values)
        self._submit(shard, write, work, partial(_expected, shard, CollectiveResult))

    def write_state(self, shard: int, key: int, state: OptimizerState, work: Work) -> None:
        """Replaces a key's optimizer state before the next step. Wait for `work` before the next push."""
        write = WriteState(self.sender, key, self.clock(key), next(self._writes), state)
        self._submit(shard, write, work, partial(_expected, shard, CollectiveResult))

    def read_state(
        self, shard: int, key: int, work: Work, on_state: Callable[[OptimizerState], None]
    ) -> None:
        """Reads a key's optimizer state. `on_state` must copy the tensors that it receives."""
        take = partial(_expected, shard, StateReply)
        self._submit(shard, ReadState(self.sender, key), work, lambda reply: on_state(take(reply).state))

    def prepare(self, key: int, gradient: Tensor | Coded, into: Tensor) -> PreparedPush:
        """Returns what all pushes of a gradient have in common. Two threads must not push it at once.

        Args:
            key: The slice's key.
            gradient: Flat, or encoded.
            into: Receives the reply (flat, same numel). The payload of a compressed reply may land in it
                (flat uint8).
        """
        return PreparedPush(PushHeader(self.sender, key, gradient), into, bytes_of(into))

    def push_pull(
        self,
        shard: int,
        push: PreparedPush,
        hyper: StepHyper,
        work: Work,
        decode: Decode | None = None,
        absent: tuple[int, ...] = (),
        on_absent: OnAbsent | None = None,
        covers: Sequence[Sender] = (),
        weight: float | None = None,
    ) -> None:
        """Pushes a gradient and reads the parameters.

        With `decode` the reply is compressed. The thread that reads the reply calls `decode` and `on_absent`
        before the work completes.

        Args:
            shard: Holds the key.
            push: The gradient, and where the reply lands.
            hyper: The step's hyperparameters, of the slice's parameters.
            work: Gets one part completed.
            decode: Decodes the reply.
            absent: Which of the slice's parameters have no gradient, as ascending indices.
            on_absent: Receives those that no contributor of the round had a gradient for.
            covers: The other workers whose gradients are in the sum.
            weight: The gradient's in the mean; None counts as 1.
        """
        number = next(self._numbers)
        message = push.header.message(number, self.clock(push.header.key), hyper, absent, covers, weight)
        settle = partial(self._take_pushed, shard, push.into, decode, on_absent)
        call = Inflight(number, shard, message, push.landing, settle, work, push.header.nbytes)
        self._connections.submit(call)

    def advance(self, keys: Sequence[int], *, drain: bool, saved: bool) -> None:
        """Records that another worker has passed on the answers to pushes that covered this one's.

        Args:
            keys: The keys of the pushes, in lockstep.
            drain: Whether the answer of key 0 had the mark, if it is among them.
            saved: As `drain`.
        """
        for key in keys:
            self._clocks[key] += 1
            self._versions[key] += 1
        self.traffic.staleness[0] += len(keys)
        self.draining = self.draining or drain
        if saved:
            self.on_saved()

    def pull(self, shard: int, key: int, into: Tensor, work: Work, decode: Decode | None = None) -> None:
        """Reads a key's parameters into `into` (flat) and updates its clock. See `push_pull` for `decode`."""
        take = partial(self._take_pulled, shard, into, decode)
        self._submit(shard, Pull(self.sender, key), work, take, into)

    def contribute(
        self, shard: int, request: Contribute, work: Work, on_result: Callable[[tuple[Tensor, ...]], None]
    ) -> None:
        """Takes part in a collective. `on_result` must copy the tensors that it receives."""
        take = partial(_expected, shard, CollectiveResult)
        self._submit(shard, request, work, lambda reply: on_result(take(reply).tensors))

    def reconnect(self, shard: int) -> None:
        """Connects to a shard again, and sends its unanswered requests again: it has moved."""
        self._connections.reconnect(shard)

    def fail(self, error: BaseException) -> None:
        """Fails all pending and future requests."""
        self._connections.fail(error)

    def close(self) -> None:
        """Closes the connections. Pending requests fail."""
        self._connections.close()

    def clock(self, key: int) -> int:
        """Returns the clock of the next push. Raises HubringError before the first pull."""
        if key not in self._clocks:
            raise HubringError(
                f"key {key}: push before the first pull, so its clock is unknown; pull the key first"
            )
        return self._clocks[key]

    def _submit(
        self, shard: int, request: Request, work: Work, settle: Settle, into: Tensor | None = None
    ) -> None:
        number = next(self._numbers)
        landing = None if into is None else bytes_of(into)
        message = encode_request(request, number)
        nbytes = 0 if message.payload is None else message.payload.nbytes
        self._connections.submit(Inflight(number, shard, message, landing, settle, work, nbytes))

    # Replies, in the thread that reads them. An exception fails the request.

    def _take_pushed(
        self, shard: int, into: Tensor, decode: Decode | None, on_absent: OnAbsent | None, reply: Reply
    ) -> None:
        applied_to = self._versions.get(reply.key, 0) if isinstance(reply, Values) else 0
        values = self._take_pulled(shard, into, decode, reply)
        self.traffic.staleness[values.staleness] += 1
        if self.on_push is not None:
            self.on_push(values.key, applied_to + values.staleness, values.version)
        if on_absent is not None:
            on_absent(values.absent)

    def _take_pulled(self, shard: int, into: Tensor, decode: Decode | None, reply: Reply) -> Values:
        if not isinstance(reply, Values):
            raise _unexpected(shard, Values, reply)
        key, values = reply.key, reply.values
        self._clocks[key], self._versions[key] = reply.clock, reply.version
        if key == 0:  # only key 0 decides: other keys may see the drain a round earlier or later
            self.draining, self.saved = self.draining or reply.drain, reply.saved
            if reply.saved:
                self.on_saved()
        if decode is not None or isinstance(values, Coded):
            _decode(values, decode)
        elif values is not None:
            into.copy_(values)
        return reply


def _expected(shard: int, kind: type[_R], reply: Reply) -> _R:
    if not isinstance(reply, kind):
        raise _unexpected(shard, kind, reply)
    return reply


def _unexpected(shard: int, kind: type[object], reply: Reply) -> HubringError:
    if isinstance(reply, Refusal):
        return _ERRORS.get(reply.code, HubringError)(f"shard {shard} refused: {reply.text}")
    return HubringError(f"shard {shard} replied with {type(reply).__name__}; expected {kind.__name__}")


def _decode(values: Tensor | Coded | None, decode: Decode | None) -> None:
    """Decodes a mean that must be compressed if there is a `decode`, and uncompressed otherwise."""
    if isinstance(values, Coded) and decode is not None:
        decode(values)
        return
    found = f"compressed with {values.codec}" if isinstance(values, Coded) else "uncompressed"
    expected = "compressed" if decode is not None else "uncompressed"
    raise ConfigError(
        f"a reply is {found}, expected {expected}; run the same Hubring version on the server and all workers"
    )
