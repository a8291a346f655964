"""KVClient: what a worker asks of the shards, and what it makes of their replies.

A push bears (sender, key, clock), so that the shards' ledgers never count it
twice, however often a broken line made it come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hubring.ps.client.connections import Connections, Inflight
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, Fenced, HubringError, JobFailed, NonFinite
from hubring.ps.core.messages import (
    Code,
    Coded,
    Contribute,
    Init,
    Pull,
    Push,
    Refusal,
    Reply,
    Request,
    Result,
    Values,
)
from hubring.ps.core.work import Work
from hubring.ps.transport import wire

if TYPE_CHECKING:
    from torch import Tensor

    from hubring.ps.core.types import Hyper, Sender
    from hubring.ps.transport.registry import Dial

Decode = Callable[[Coded], None]
"""Takes a mean that came in a codec; its payload may be read until it returns.

Raises:
    HubringError: It is in another codec than was due.
"""

_ERRORS: dict[Code, type[HubringError]] = {
    Code.FENCED: Fenced,
    Code.JOB_FAILED: JobFailed,
    Code.NOT_FINITE: NonFinite,
}


class KVClient:
    """Push, pull and take part in rounds on a set of shards.

    Args:
        sender: Rank and incarnation, as the coordinator gave them.
        shards: How many shards there are.
        dial: Connects to one of them; called in a thread of the lines, again after a loss.
        bounded: No line is to run further ahead of its answers than `hubring.ps.client.send_window` lets it.
    """

    def __init__(self, sender: Sender, shards: int, dial: Dial, *, bounded: bool = True) -> None:
        self.sender = sender
        self.traffic = Traffic()
        self.draining = False
        """The hub asks to stop after this step. In lockstep modes every rank sees it in the same step."""
        self._clocks: dict[int, int] = {}
        self._numbers = itertools.count()
        self._connections = Connections(shards, dial, self.traffic, bounded=bounded)

    @property
    def completed(self) -> int:
        """Steps that count as this sender's on all keys that it has read so far."""
        return min(self._clocks.values(), default=0)

    def wait_connected(self, timeout: float) -> None:
        """Returns once every shard is connected.

        Raises:
            ServerUnreachable: A shard could not be reached by any transport.
        """
        self._connections.connected.wait(timeout)

    # Requests. Tensors belong to the client until the work is done.

    def init(self, shard: int, key: int, values: Tensor, work: Work) -> None:
        """Gives a key its first values, unless it has some."""
        self._submit(shard, Init(self.sender, key, values), None, work)

    def push_pull(
        self,
        shard: int,
        key: int,
        gradient: Tensor | Coded,
        into: Tensor,
        hyper: Hyper,
        work: Work,
        decode: Decode | None = None,
    ) -> None:
        """Pushes a gradient; the parameters that may be read next land in `into` (flat, same numel).

        With `decode` the answer is due in a codec: its payload may land in `into`
        (flat uint8), and `decode` gets it in whichever thread reads it, before the work is done.
        """
        clock = self._clocks.get(key)
        if clock is None:
            raise HubringError(f"key {key} was pushed before it was ever pulled: its clock is unknown")
        push = Push(self.sender, key, clock, gradient, hyper)
        self._submit(shard, push, into, work, self._note_staleness, decode)

    def pull(self, shard: int, key: int, into: Tensor, work: Work, decode: Decode | None = None) -> None:
        """Brings a key's parameters into `into` (flat), and its clock; `decode` as in `push_pull`."""
        self._submit(shard, Pull(self.sender, key), into, work, decode=decode)

    def contribute(
        self, shard: int, request: Contribute, work: Work, on_result: Callable[[tuple[Tensor, ...]], None]
    ) -> None:
        """Takes part in a collective; `on_result` gets tensors that it must copy out of."""

        def on_reply(reply: Reply) -> None:
            if not isinstance(reply, Result):
                raise HubringError(f"shard {shard} answered a collective with {type(reply).__name__}")
            on_result(reply.tensors)

        self._submit(shard, request, None, work, on_reply)

    def _note_staleness(self, reply: Reply) -> None:
        if isinstance(reply, Values):
            self.traffic.staleness[reply.staleness] += 1

    def batched(self) -> AbstractContextManager[None]:
        """Collects the requests made meanwhile: what leaves together wakes a shard once."""
        return self._connections.batched()

    def attend(self, work: Work, timeout: float | None) -> None:
        """Reads replies in this thread until `work` is over or `timeout` seconds have passed."""
        self._connections.attend(work, timeout)

    def fail(self, error: BaseException) -> None:
        """Fails everything under way and everything still to come."""
        self._connections.fail(error)

    def close(self) -> None:
        """Ends the lines; what is under way fails."""
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
        """Takes a reply in; whatever it raises fails the call."""
        if isinstance(reply, Refusal):
            raise _ERRORS.get(reply.code, ConfigError)(f"shard {shard} refused: {reply.text}")
        if isinstance(reply, Values):
            self._clocks[reply.key] = reply.clock
            if reply.key == 0 and reply.drain:
                # Only key 0 decides: other keys may see the drain a round earlier or later.
                self.draining = True
            if into is not None:
                _take(reply.values, into, decode)


def _take(values: Tensor | Coded | None, into: Tensor, decode: Decode | None) -> None:
    """Brings an answer to where it was due."""
    if isinstance(values, Coded) and decode is not None:
        decode(values)
    elif isinstance(values, Coded) or decode is not None:
        came = f"in {values.codec}" if isinstance(values, Coded) else "uncompressed"
        raise ConfigError(f"an answer came {came}: start the server and all workers from the same version")
    elif values is not None:
        into.copy_(values)
