"""What changes a shard's store besides its workers: the coordinator's calls, and what a primary forwards.

Law: until it is promoted a standby serves only its primary. From then on it refuses its primary, which must
exit. A shard with another stream is not its primary, and asks the coordinator what becomes of that stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from math import inf
from pathlib import Path

from hubring.protos import control_pb2 as pb
from hubring.ps.checkpoint import shard_file
from hubring.ps.core.bounds import clean, clean_message
from hubring.ps.core.errors import ConfigError, ConnectionLost, HubringError, ServerUnreachable
from hubring.ps.core.messages import (
    Change,
    ClosedRound,
    Code,
    CollectiveResult,
    Contribute,
    CoordinatorCall,
    Delivery,
    Forwarded,
    Probe,
    Refusal,
    Request,
    StoreCommand,
    Ticket,
    Transfer,
)
from hubring.ps.core.types import Member, View, incarnation_from_wire
from hubring.ps.job.control_messages import bucket_from_proto, slice_from_proto
from hubring.ps.security.certificate import Identity
from hubring.ps.shard.loop import OTHER_STREAM, ShardLoop
from hubring.ps.shard.standby_stream import StandbyLost, Stream, pass_failure
from hubring.ps.transport.base import Connection, Transport
from hubring.ps.transport.registry import FASTEST_FIRST, ShardAddress, dial_by, reach, transport

log = logging.getLogger(__name__)

Action = Callable[[ShardLoop], None]
"""Runs in the loop's thread."""

_CODES = {1: Code.NOT_FINITE, 78: Code.MISMATCH}
"""The refusal's code for a failed job, by the exit code of its workers."""


def action(call: CoordinatorCall, index: int) -> Action:
    """Returns what a call does to the loop of shard number `index`. Reads the checkpoint that it names.

    Raises:
        HubringError: The checkpoint cannot be read.
    """
    match call.command:
        case StoreCommand.SET_VIEW:
            return _set_view(pb.View.FromString(call.message))
        case StoreCommand.SET_PLAN:
            return _set_plan(pb.ShardAssignment.FromString(call.message), index)
        case StoreCommand.DRAIN:
            return lambda loop: loop.store.drain()
        case StoreCommand.FAIL:
            return _fail(pb.FailRequest.FromString(call.message))
        case StoreCommand.RESET:
            return lambda loop: loop.reset()
        case StoreCommand.CONFIRM:
            return lambda loop: None


def checked_path(path: str) -> Path:
    """Returns a folder or file that the coordinator named.

    Raises:
        ConfigError: The path is relative, or leaves a folder with `..`.
    """
    checked = Path(path)
    if not checked.is_absolute() or ".." in checked.parts or not path.isprintable():
        raise ConfigError(
            f"the path {clean(path)!r} is relative or has `..`; use an absolute path in --checkpoint-dir"
        )
    return checked


def _set_view(message: pb.View) -> Action:
    members = tuple(
        Member(member.rank, incarnation_from_wire(member.incarnation)) for member in message.members
    )
    view = View(message.epoch, members, clean_message(message.finished))
    return lambda loop: loop.send(loop.store.on_view(view))


def _set_plan(message: pb.ShardAssignment, index: int) -> Action:
    buckets = [bucket_from_proto(bucket) for bucket in message.buckets]
    slices = [piece for piece in map(slice_from_proto, message.slices) if piece.shard == index]
    keys = [piece.key for piece in slices]
    snapshot = shard_file.load(checked_path(message.restore), keys) if message.restore else None

    def assign(loop: ShardLoop) -> None:
        if message.extends:
            loop.store.extend(slices, buckets, message.version, snapshot)
            return
        loop.assign(slices, buckets)
        if snapshot is not None:
            loop.store.restore(snapshot, message.version)

    return assign


def _fail(message: pb.FailRequest) -> Action:
    code, text = _CODES.get(message.exit_code, Code.JOB_FAILED), clean_message(message.text)
    return lambda loop: loop.send(loop.store.fail(text, code))


_NOT_SERVING = Refusal(Code.BAD_REQUEST, "this shard is a standby and serves no workers yet")


class Follower:
    """A standby's part of a shard's loop, for `ShardLoop.follow`. For the loop's thread only.

    Args:
        loop: The shard's.
        stream: The secret of its primary's stream; None before it has a primary.
        index: The primary's number.
    """

    def __init__(self, loop: ShardLoop, stream: bytes | None, index: int) -> None:
        self._loop, self._stream, self._index = loop, stream, index
        self._next = 0
        """The number of the next change to apply."""
        self._early: dict[int, tuple[Change, Ticket]] = {}
        """Changes that came before an earlier one, by number."""

    def answer(self, number: int, request: Request | Probe | Forwarded, ticket: Ticket) -> list[Delivery]:
        """Applies a change of the primary, in its turn; returns the acknowledgements."""
        if not isinstance(request, Forwarded):
            return [Delivery(ticket, _NOT_SERVING)]
        if self._stream is None or self._stream != request.stream:
            return [Delivery(ticket, OTHER_STREAM)]
        if number < self._next:  # the acknowledgement was lost
            return [Delivery(ticket, CollectiveResult())]
        self._early[number] = request.change, ticket
        acknowledged = []
        while self._next in self._early:
            change, taken = self._early.pop(self._next)
            self._apply(change)
            acknowledged.append(Delivery(taken, CollectiveResult()))
            self._next += 1
        return acknowledged

    def _apply(self, change: Change) -> None:
        if isinstance(change, CoordinatorCall):  # it succeeded on the primary: an error ends this process
            self._loop.obey(change, action(change, self._index))
            return
        try:
            match change:
                case ClosedRound() | Transfer():
                    self._loop.store.apply(change)
                case Contribute():
                    # The primary reuses its memory once this change is acknowledged.
                    own = replace(change, tensors=tuple(tensor.clone() for tensor in change.tensors))
                    self._loop.store.handle(own, None)
                case _:
                    self._loop.store.handle(change, None)
        except HubringError as error:  # the primary raised it too, and reports it
            log.debug("a change of the primary failed: %s", error)


UNREACHABLE_SECONDS = 2.0
"""Longer than a restarted network needs, shorter than the workers' patience (`REDIAL_SECONDS`)."""
_PAUSE = 0.05


class StandbyVerdict(Enum):
    """The coordinator's word on a stream."""

    WAIT = auto()
    ALONE = auto()
    """The standby is given up: the primary goes on without one."""
    STOP = auto()
    """The primary is not needed any more."""


DIAL_SECONDS = 2.0


class StandbyLink:
    """Opens a primary's streams. Safe from any thread.

    Args:
        ask: Asks the coordinator about the stream with a secret; the second argument is whether the standby
            cannot be reached.
        replaced: Called with the reason when a standby has taken this shard's place.
        identity: The certificate that this shard shows to a standby; None for none.
    """

    def __init__(
        self,
        ask: Callable[[bytes, bool], StandbyVerdict],
        replaced: Callable[[str], None],
        identity: Identity | None = None,
    ) -> None:
        self.identity = identity
        self._ask = ask
        self._replaced = replaced
        self._kinds: dict[str, Transport] = {name: transport(name) for name in FASTEST_FIRST}

    def begin(
        self, loop: ShardLoop, standby: ShardAddress, secret: bytes, wanted: Callable[[], bool]
    ) -> Future[None]:
        """Forwards a loop's state and all changes to a standby.

        Args:
            loop: The loop.
            standby: Where the standby is.
            secret: The stream's secret.
            wanted: Whether to begin; called in the loop's thread.

        Returns:
            A result once the standby has the state, or is given up.

        Raises:
            ServerUnreachable: The standby cannot be reached.
        """
        kind, connection = reach("the standby", standby, self._kinds, DIAL_SECONDS)
        dial = partial(dial_by, kind, standby, DIAL_SECONDS)

        def restore(lost: ConnectionLost) -> None:
            thread = threading.Thread(
                target=self._restore, args=(lost, loop, dial, secret), name="standby", daemon=True
            )
            thread.start()

        def begin() -> None:
            if not wanted():
                connection.close()
                received.set_result(None)
                return
            stream = Stream(secret, kind.allocate, restore, self._replaced)
            loop.replicate(stream, connection, received)

        received: Future[None] = Future()
        loop.command(begin).add_done_callback(lambda done: pass_failure(done, received))
        return received

    def _restore(
        self, lost: ConnectionLost, loop: ShardLoop, dial: Callable[[], Connection], secret: bytes
    ) -> None:
        """Connects a stream again, or learns that there is no standby any more.

        Only the coordinator gives up a standby. Until it does, the primary dials again. Once it has not
        reached the standby for UNREACHABLE_SECONDS, it asks the coordinator to give it up.
        """
        log.debug("the connection to the standby broke (%s); connecting again", lost)
        began = -inf if isinstance(lost, StandbyLost) else time.monotonic()
        while True:
            unreachable = time.monotonic() - began > UNREACHABLE_SECONDS
            if not unreachable:
                try:
                    loop.command(partial(loop.rejoin, secret, dial()))
                    return
                except ServerUnreachable as error:
                    log.debug("the standby is not reached: %s", error)
            verdict = self._ask(secret, unreachable)
            if verdict is StandbyVerdict.ALONE:
                loop.command(lambda: loop.leave_standby(secret))
            if verdict is not StandbyVerdict.WAIT:
                return
            time.sleep(_PAUSE)
