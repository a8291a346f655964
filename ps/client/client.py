"""KVClient: sends a worker's requests to the shards and applies their replies.

Each push carries (sender, key, clock). The shards count a push once, even if
a broken connection makes the client send it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hubring.ps.client.connections import Connections
from hubring.ps.client.inflight import Inflight
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, Fenced, HubringError, JobFailed, NonFinite
from hubring.ps.core.messages import (
    Code,
    Coded,
    Contribute,
    Init,
    Pull,
    Push,
    ReadState,
    Refusal,
    Reply,
    Request,
    Result,
    State,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.work import Work
from hubring.ps.transport import wire

if TYPE_CHECKING:
    from torch import Tensor

    from hubring.ps.core.optimizer_state import OptimizerState
    from hubring.ps.core.types import Hyper, Sender
    from hubring.ps.transport.registry import Dial

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


class KVClient:
    """Push, pull and take part in collectives on a set of shards.

    Args:
        sender: The rank and incarnation that the coordinator assigned.
        shards: Number of shards.
        dial: Connects to a shard. Called in the connections' own thread, and again after a loss.
        bounded: Whether `hubring.ps.client.send_window` limits the unanswered bytes of each shard.
    """

    def __init__(self, sender: Sender, shards: int, dial: Dial, *, bounded: bool = True) -> None:
        self.sender = sender
        self.traffic = Traffic()
        self.draining = False
        """Whether the hub asks to stop after this step.

        In lockstep modes every rank sees it in the same step.
        """
        self.on_push: Callable[[int, int, int], None] | None = None
        """Called with each answered push: its key, the version that it was applied to, and the version of the
        answer. It runs in the thread that reads the reply."""
        self._clocks: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        """The version that this sender has read last, by key. It is always kept: `on_push` is set after the
        first pull."""
        self._numbers = itertools.count()
        self._writes = itertools.count()
        self._connections = Connections(sender, shards, dial, self.traffic, bounded=bounded)

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
            ServerUnreachable: No transport reaches a shard.
            DeadlineExceeded: `timeout` seconds have passed.
        """
        self._connections.connected.wait(timeout)

    # Requests. Tensors belong to the client until the work is done.

    def init(
        self, shard: int, key: int, values: Tensor, work: Work, state: OptimizerState | None = None
    ) -> None:
        """Sets a key's first values and optimizer state. The shard ignores them if the key has values."""
        self._submit(shard, Init(self.sender, key, values, state), None, work)

    def write_parameters(self, shard: int, key: int, values: Tensor, work: Work) -> None:
        """Replaces a key's parameters before the next step. Wait for `work` before the next push."""
        clock = self._clock(key)
        write = WriteParameters(self.sender, key, clock, next(self._writes), values)
        self._submit(shard, write, None, work)

    def write_state(self, shard: int, key: int, state: OptimizerState, work: Work) -> None:
        """Replaces a key's optimizer state before the next step. Wait for `work` before the next push."""
        clock = self._clock(key)
        self._submit(shard, WriteState(self.sender, key, clock, next(self._writes), state), None, work)

    def read_state(
        self, shard: int, key: int, work: Work, on_state: Callable[[OptimizerState], None]
    ) -> None:
        """Reads a key's optimizer state. `on_state` must copy the tensors that it receives."""

        def on_reply(reply: Reply) -> None:
            if not isinstance(reply, State):
                raise _unexpected(shard, reply, "a read of the optimizer's state", State)
            on_state(reply.state)

        self._submit(shard, ReadState(self.sender, key), None, work, on_reply)

    def push_pull(
        self,
        shard: int,
        key: int,
        gradient: Tensor | Coded,
        into: Tensor,
        hyper: Hyper,
        work: Work,
        decode: Decode | None = None,
        absent: tuple[int, ...] = (),
        on_absent: OnAbsent | None = None,
    ) -> None:
        """Pushes a gradient and reads the parameters into `into` (flat, same numel).

        With `decode` the reply is compressed. Its payload may land in `into` (flat uint8).
        The thread that reads the reply calls `decode` and `on_absent` before the work completes.

        Args:
            shard: Holds the key.
            key: The slice's key.
            gradient: Flat, or encoded.
            into: Receives the reply.
            hyper: The step's hyperparameters.
            work: Gets one part completed.
            decode: Decodes the reply.
            absent: Which of the slice's parameters have no gradient, as ascending indices.
            on_absent: Receives those that no contributor of the round had a gradient for.
        """
        push = Push(self.sender, key, self._clock(key), gradient, hyper, absent)
        on_reply = self._note_push
        if on_absent is not None:

            def on_reply(reply: Reply) -> None:
                self._note_push(reply)
                if isinstance(reply, Values):
                    on_absent(reply.absent)

        self._submit(shard, push, into, work, on_reply, decode)

    def pull(self, shard: int, key: int, into: Tensor, work: Work, decode: Decode | None = None) -> None:
        """Reads a key's parameters into `into` (flat) and updates its clock. See `push_pull` for `decode`."""
        self._submit(shard, Pull(self.sender, key), into, work, self._note_version, decode)

    def contribute(
        self, shard: int, request: Contribute, work: Work, on_result: Callable[[tuple[Tensor, ...]], None]
    ) -> None:
        """Takes part in a collective. `on_result` must copy the tensors that it receives."""

        def on_reply(reply: Reply) -> None:
            if not isinstance(reply, Result):
                raise _unexpected(shard, reply, "a collective", Result)
            on_result(reply.tensors)

        self._submit(shard, request, None, work, on_reply)

    def _clock(self, key: int) -> int:
        clock = self._clocks.get(key)
        if clock is None:
            raise HubringError(
                f"key {key}: push before the first pull, so its clock is unknown; pull the key first"
            )
        return clock

    def _note_push(self, reply: Reply) -> None:
        if isinstance(reply, Values):
            self.traffic.staleness[reply.staleness] += 1
            if self.on_push is not None:
                applied_to = self._versions.get(reply.key, 0) + reply.staleness
                self.on_push(reply.key, applied_to, reply.version)
        self._note_version(reply)

    def _note_version(self, reply: Reply) -> None:
        if isinstance(reply, Values):
            self._versions[reply.key] = reply.version

    def batched(self) -> AbstractContextManager[None]:
        """Collects requests and sends them together, so that each shard wakes once."""
        return self._connections.batched()

    def attend(self, work: Work, timeout: float | None) -> None:
        """Reads replies in this thread until `work` completes or `timeout` seconds have passed."""
        self._connections.attend(work, timeout)

    def reconnect(self, shard: int) -> None:
        """Connects to a shard again, and sends its unanswered requests again: it has moved."""
        self._connections.reconnect(shard)

    def fail(self, error: BaseException) -> None:
        """Fails all pending and future requests."""
        self._connections.fail(error)

    def close(self) -> None:
        """Closes the connections. Pending requests fail."""
        self._connections.close()

    def _submit(
        self,
        shard: int,
        request: Request,
        into: Tensor | None,
        work: Work,
        on_reply: Callable[[Reply], None] | None = None,
        decode: Decode | None = None,
    ) -> None:
        number = next(self._numbers)

        def settle(reply: Reply) -> None:
            self._settle(shard, reply, into, decode)
            if on_reply is not None:
                on_reply(reply)

        message = wire.encode_request(request, number)
        self._connections.submit(Inflight(number, shard, message, into, settle, work))

    def _settle(self, shard: int, reply: Reply, into: Tensor | None, decode: Decode | None) -> None:
        """Applies a reply. An exception fails the request."""
        if isinstance(reply, Refusal):
            raise _ERRORS.get(reply.code, HubringError)(f"shard {shard} refused: {reply.text}")
        if isinstance(reply, Values):
            self._clocks[reply.key] = reply.clock
            if reply.key == 0 and reply.drain:
                # Only key 0 decides: other keys may see the drain a round earlier or later.
                self.draining = True
            if into is not None:
                _take(reply.values, into, decode)


def _unexpected(shard: int, reply: Reply, what: str, expected: type[Reply]) -> HubringError:
    came = type(reply).__name__
    return HubringError(f"shard {shard} replied to {what} with {came}; expected {expected.__name__}")


def _take(values: Tensor | Coded | None, into: Tensor, decode: Decode | None) -> None:
    """Decodes or copies a reply's values into `into`."""
    if isinstance(values, Coded) and decode is not None:
        decode(values)
    elif isinstance(values, Coded) or decode is not None:
        found = f"compressed with {values.codec}" if isinstance(values, Coded) else "uncompressed"
        expected = "compressed" if decode is not None else "uncompressed"
        raise ConfigError(
            f"a reply is {found}, expected {expected};"
            " run the same Hubring version on the server and all workers"
        )
    elif values is not None:
        into.copy_(values)
