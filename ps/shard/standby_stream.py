"""A primary's stream of changes to its standby, and the replies that wait for it.

Law: a reply leaves once the standby has acknowledged all changes that came before it, one of which is younger
than its request. So no worker sees what the standby does not have, and a paused primary that was replaced
sends no more replies. If the connection breaks, the replies wait until the standby is reached again, or
until the coordinator has given it up.
"""

from __future__ import annotations

import select
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from hubring.protos import control_pb2 as pb
from hubring.ps.core.errors import ConnectionLost
from hubring.ps.core.messages import (
    Change,
    ClosedRound,
    Code,
    Coded,
    CoordinatorCall,
    Refusal,
    Reply,
    StoreCommand,
    Values,
)
from hubring.ps.transport.base import Connection, Message
from hubring.ps.transport.decode import decode_reply
from hubring.ps.transport.encode import encode_change
from hubring.ps.transport.polling import poller

SILENT_SECONDS = 30.0
"""Seconds without an acknowledgement after which a standby counts as lost, although its process lives."""
STALLED_SECONDS = 1.0
"""Seconds without an acknowledgement after which the coordinator looks at the standby's heartbeats."""


class StandbyLost(ConnectionLost):
    """A standby is connected, but acknowledges nothing, or follows another stream."""


class Stream:
    """Forwards changes. For the shard's thread only.

    Args:
        secret: Proves to the standby that the changes come from its primary.
        allocate: Returns memory from which the connection sends fastest.
        lost: Called with the cause when the connection breaks. It must bring about `attach` or `leave`.
        replaced: Called with the standby's refusal when it has taken this shard's place.
        clock: Returns seconds.
    """

    def __init__(
        self,
        secret: bytes,
        allocate: Callable[[int], memoryview],
        lost: Callable[[ConnectionLost], None],
        replaced: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.secret = secret
        self._allocate = allocate
        self._lost = lost
        self._replaced = replaced
        self._clock = clock
        self._connection: Connection | None = None
        self._poller = poller()
        self.waitable = self._poller.fileno()
        """Readable when `receive` has acknowledgements."""
        self._next = self._begun = 0
        self._unacknowledged: dict[int, Message] = {}
        self._heard = 0.0
        """When the last acknowledgement came, or a change was sent after all were acknowledged."""
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        """Replies, each with the last change that it waits for."""
        self._lent: dict[int, Tensor] = {}
        """Memory in use, by the change's number."""
        self._borrowed: Tensor | None = None
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)

    # The store's side.

    def allocate(self, like: Tensor) -> Tensor:
        """Returns memory for the total of the next change."""
        free = self._free[like.dtype, like.numel()]
        memory = free.pop() if free else torch.frombuffer(self._allocate(like.nbytes), dtype=like.dtype)
        self._borrowed = memory
        return memory

    def append(self, change: Change) -> None:
        """Forwards a change. Its tensors belong to the stream until it is acknowledged."""
        number, self._next = self._next, self._next + 1
        lent = self._borrowed
        if (
            lent is not None
            and isinstance(change, ClosedRound)
            and change.total.data_ptr() == lent.data_ptr()
        ):
            self._lent[number], self._borrowed = lent, None
        elif isinstance(change, CoordinatorCall) and change.command in (
            StoreCommand.SET_PLAN,
            StoreCommand.RESET,
        ):
            self._free.clear()
        if not self._unacknowledged:
            self._heard = self._clock()
        message = self._unacknowledged[number] = encode_change(change, number, self.secret)
        self._send(message)

    # The loop's side.

    def begin(self) -> None:
        """Notes that the loop begins to handle a request or a command."""
        self._begun = self._next

    def hold(self, release: Callable[[], None]) -> None:
        """Calls `release` once all changes so far, and at least one since `begin`, are acknowledged."""
        if self._next == self._begun:
            self.append(CoordinatorCall(StoreCommand.CONFIRM))
        self._held.append((self._next - 1, release))

    def flush(self) -> None:
        """Sends what is buffered. Call it before the thread waits."""
        if self._connection is not None:
            try:
                self._connection.flush()
            except ConnectionLost as lost:
                self._drop(lost)

    def receive(self) -> None:
        """Reads acknowledgements and releases the replies that waited for them."""
        if self._connection is None:
            return
        try:
            for message in self._connection.receive():
                self._take(message)
        except ConnectionLost as lost:
            self._drop(lost)

    @property
    def patience(self) -> float | None:
        """Seconds until `check` must be called; None if nothing is unacknowledged."""
        if not self._unacknowledged or self._connection is None:
            return None
        return max(0.0, self._heard + SILENT_SECONDS - self._clock())

    @property
    def stalled(self) -> bool:
        """Whether nothing has been acknowledged for STALLED_SECONDS; from any thread."""
        return bool(self._unacknowledged) and self._clock() - self._heard > STALLED_SECONDS

    def check(self) -> None:
        """Gives up a connection whose peer is silent."""
        if self.patience == 0.0:
            self.receive()  # this thread may have been busy for as long
        if self.patience == 0.0:
            self._drop(StandbyLost(f"no acknowledgement for {SILENT_SECONDS:g} s"))

    def attach(self, connection: Connection) -> None:
        """Uses a new connection, and sends all unacknowledged changes on it."""
        self._drop(None)
        self._connection, self._heard = connection, self._clock()
        self._poller.register(connection.waitable, select.EPOLLIN)
        for message in list(self._unacknowledged.values()):
            self._send(message)
        self.flush()

    def leave(self) -> None:
        """Ends the stream: releases all replies, because there is no standby any more."""
        self._drop(None)
        while self._held:
            self._held.popleft()[1]()

    def close(self) -> None:
        """Closes the connection, and forgets the replies."""
        self._drop(None)
        self._held.clear()
        self._poller.close()

    def _send(self, message: Message) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message)
            except ConnectionLost as lost:
                self._drop(lost)

    def _take(self, message: Message) -> None:
        if message.damage:  # whatever it acknowledges is sent again, and acknowledged again
            raise ConnectionLost(f"an acknowledgement is damaged: {message.damage}")
        number, reply = decode_reply(message)
        if isinstance(reply, Refusal) and reply.code is Code.FENCED:
            self._replaced(reply.text)
        elif isinstance(reply, Refusal) and reply.code is Code.OTHER_STREAM:
            raise StandbyLost(reply.text)
        elif isinstance(reply, Refusal):  # damaged on its way
            raise ConnectionLost(f"the standby received {reply.text}")
        else:
            self._acknowledge(number)

    def _acknowledge(self, number: int) -> None:
        """The standby has this change and, as it applies them in order, all earlier ones."""
        self._heard = self._clock()
        while self._unacknowledged and (first := next(iter(self._unacknowledged))) <= number:
            del self._unacknowledged[first]
            memory = self._lent.pop(first, None)
            if memory is not None:
                self._free[memory.dtype, memory.numel()].append(memory)
        while self._held and self._held[0][0] <= number:
            self._held.popleft()[1]()

    def _drop(self, lost: ConnectionLost | None) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._poller.unregister(connection.waitable)
            connection.close()
            if lost is not None:
                self._lost(lost)


def lasting(reply: Reply) -> Reply:
    """Returns a reply that stays as it is while it waits."""
    if isinstance(reply, Values) and not reply.stable:
        values = reply.values
        if isinstance(values, Coded):
            values = replace(values, payload=values.payload.clone())
        return replace(reply, values=values.clone() if isinstance(values, Tensor) else values)
    return reply


def pass_failure(done: Future[None], waiting: Future[None]) -> None:
    """Ends a future that waits for more than another one, if that other one failed."""
    if done.cancelled():
        waiting.cancel()
    elif (error := done.exception()) is not None:
        waiting.set_exception(error)


def without_checkpoint(call: CoordinatorCall) -> tuple[CoordinatorCall, list[int]]:
    """Returns a plan for a standby, and the keys whose restored state must follow it."""
    plan = pb.ShardAssignment.FromString(call.message)
    restored = [piece.key for piece in plan.slices] if plan.restore else []
    plan.restore = ""
    return CoordinatorCall(call.command, plan.SerializeToString()), restored


class CallHistory:
    """Keeps the calls that made a store what it is, besides what its workers sent."""

    def __init__(self) -> None:
        self._plans: list[CoordinatorCall] = []
        self._last: dict[StoreCommand, CoordinatorCall] = {}

    def note(self, call: CoordinatorCall) -> None:
        """Notes a call that the store has carried out."""
        if call.command is StoreCommand.RESET:
            self._plans.clear()
            self._last.clear()
        elif call.command is StoreCommand.SET_PLAN:
            plan, _ = without_checkpoint(call)
            if not pb.ShardAssignment.FromString(plan.message).extends:
                self._plans.clear()
            self._plans.append(plan)
        elif call.command is not StoreCommand.CONFIRM:
            self._last[call.command] = call

    def calls(self) -> list[CoordinatorCall]:
        """Returns the calls to repeat, in an order that fits: plans, the last view, and what ends the job."""
        order = (StoreCommand.SET_VIEW, StoreCommand.DRAIN, StoreCommand.FAIL)
        return [*self._plans, *(self._last[command] for command in order if command in self._last)]
