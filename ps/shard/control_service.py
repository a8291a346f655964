"""ShardControl: the coordinator's calls to a shard, passed to the shard's loop.

Calls arrive on gRPC's threads. All access to the store runs in the loop. A save is
split: the loop clones each key at the version to save, and the calling thread
writes the clones to disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ShardControlServicer, add_ShardControlServicer_to_server
from hubring.ps.checkpoint import shard_file
from hubring.ps.core.counters import usage
from hubring.ps.core.errors import HubringError, NonFinite
from hubring.ps.core.messages import CoordinatorCall, StoreCommand
from hubring.ps.optim.sums import all_finite
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.shard.standby import Action, Follower, StandbyLink, action, checked_path
from hubring.ps.store.key_state import Snapshot
from hubring.ps.transport.registry import ShardAddress

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class ShardControl(ShardControlServicer):
    """Serves `ShardControl` on the gRPC port of the shard's data.

    The port must be open before the shard can register, and the registration returns
    the shard's number. Calls in between wait.
    """

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._saving = threading.Lock()

    def add_to(self, server: grpc.Server) -> None:
        """Adds the service to a server that has not started yet."""
        add_ShardControlServicer_to_server(self, server)

    def serve(self, loop: ShardLoop, index: int, standby_link: StandbyLink | None = None) -> None:
        """Begins to answer calls for shard number `index`, whose `loop` is about to run.

        Args:
            loop: The shard's.
            index: Its number; a standby's is that of the shard that it follows, once it follows one.
            standby_link: Connects the shard with its standby; None if it can have none.
        """
        self._loop = loop
        self._index = index
        self._standby_link = standby_link
        self._ready.set()

    # Calls that change the store.

    def SetView(self, request: pb.View, context: grpc.ServicerContext) -> pb.Ack:
        return self._change(StoreCommand.SET_VIEW, request, context)

    def SetPlan(self, request: pb.ShardAssignment, context: grpc.ServicerContext) -> pb.Ack:
        try:
            return self._change(StoreCommand.SET_PLAN, request, context)
        except HubringError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.Ack:
        return self._change(StoreCommand.DRAIN, request, context)

    def Fail(self, request: pb.FailRequest, context: grpc.ServicerContext) -> pb.Ack:
        return self._change(StoreCommand.FAIL, request, context)

    def Reset(self, request: pb.ResetRequest, context: grpc.ServicerContext) -> pb.Ack:
        return self._change(StoreCommand.RESET, request, context)

    # The standby.

    def Follow(self, request: pb.FollowRequest, context: grpc.ServicerContext) -> pb.Ack:
        def follow(loop: ShardLoop) -> None:
            self._index = request.shard
            loop.follow(request.stream, Follower(loop, request.stream, request.shard).answer)

        self._in_loop(_if_wanted(follow, context), context)
        return pb.Ack()

    def Replicate(self, request: pb.ReplicateRequest, context: grpc.ServicerContext) -> pb.Ack:
        self._await_ready(context)
        assert self._standby_link is not None
        standby = ShardAddress.from_proto(request.standby, self._standby_link.identity)
        try:
            received = self._standby_link.begin(self._loop, standby, request.stream, context.is_active)
            self._result(received, context)
        except HubringError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.Ack()

    def Promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.Ack:
        self._in_loop(_if_wanted(ShardLoop.promote, context), context)
        return pb.Ack()

    # Calls that only read.

    def Save(self, request: pb.SaveRequest, context: grpc.ServicerContext) -> pb.SaveReply:
        version = None if request.step < 0 else request.step
        if unsound := self._in_loop(lambda loop: loop.store.unsound, context):
            return pb.SaveReply(refused=f"shard {self._index}: {unsound}")
        try:
            path = checked_path(request.directory) / f"shard-{self._index}.safetensors"
        except HubringError as error:
            self._loop.rejections.add("path", log, f"refused a save: {error}")
            return pb.SaveReply(refused=f"shard {self._index}: {error}")
        with self._saving:
            if not self._in_loop(lambda loop: loop.store.capture_at(version), context):
                return pb.SaveReply(
                    too_late=True, newest=self._in_loop(lambda loop: loop.store.stats().newest, context)
                )
            snapshot = self._catch(context)
        if snapshot is None:
            return pb.SaveReply(refused=f"shard {self._index}: the save of step {request.step} was cancelled")
        try:
            self._check(snapshot, context)
            written = shard_file.save(path, snapshot)
        except HubringError as error:
            return pb.SaveReply(refused=f"shard {self._index}: {error}")
        return pb.SaveReply(
            file=written.name,
            sha256=written.sha256,
            bytes=written.bytes,
            keys=written.keys,
            slowest=min((clock for state in snapshot.values() for clock in state.clocks.values()), default=0),
        )

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.ShardStats:
        return self._in_loop(self._stats, context)

    def _stats(self, loop: ShardLoop) -> pb.ShardStats:
        stats = loop.store.stats()
        return pb.ShardStats(
            shard=self._index,
            bytes_in=loop.traffic.bytes_received,
            bytes_out=loop.traffic.bytes_sent,
            pushes=stats.pushes,
            duplicates=stats.duplicates,
            dropped=stats.dropped,
            keys=stats.keys,
            oldest=stats.oldest,
            newest=stats.newest,
            collectives=stats.collectives,
            repeatable=stats.repeatable,
            staleness=stats.staleness,
            partial=[
                pb.Contributors(key=run.key, first=run.first, last=run.last, ranks=run.ranks)
                for run in stats.partial
            ],
            queued_ns=loop.service.queued,
            handled_ns=loop.service.handled,
            held_ns=loop.service.held,
            damaged=loop.service.damaged,
            refused=loop.rejections.counts(),
            **usage()._asdict(),
        )

    def _check(self, snapshot: Snapshot, context: grpc.ServicerContext) -> None:
        """Refuses a snapshot with NaN or infinite parameters, which finite gradients can still produce.

        Raises:
            NonFinite: A parameter is not finite; names the first.
        """
        unsound = next((key for key, state in snapshot.items() if not all_finite(state.values)), None)
        if unsound is not None:
            state = snapshot[unsound]
            where = self._in_loop(lambda loop: loop.store.name_unsound(unsound, state.values), context)
            raise NonFinite(f"{where} after step {state.version}; {NonFinite.fix}")

    def _catch(self, context: grpc.ServicerContext) -> Snapshot | None:
        """Waits for the snapshot that `capture_at` began; returns None if the caller cancels.

        It needs no timeout of its own: the caller has one.
        """
        caught = threading.Event()
        found: list[Snapshot] = []

        def look(loop: ShardLoop) -> None:
            snapshot = loop.store.captured()
            if snapshot is not None:
                found.append(snapshot)
                caught.set()

        def begin(loop: ShardLoop) -> None:
            loop.after_turn = lambda: look(loop)

        def give_up(loop: ShardLoop) -> None:
            loop.after_turn = None
            loop.store.stop_capture()

        self._in_loop(begin, context)
        if context.add_callback(caught.set):
            caught.wait()
        self._in_loop(give_up, context)
        return found[0] if found else None

    def _change(self, command: StoreCommand, request: Message, context: grpc.ServicerContext) -> pb.Ack:
        """Changes the store; returns once the standby, if there is one, has the change too."""
        self._await_ready(context)
        call = CoordinatorCall(command, request.SerializeToString())
        act = action(call, self._index)
        if context.is_active():  # otherwise its coordinator was killed meanwhile; the next one calls again
            self._result(self._loop.change(call, act), context)
        return pb.Ack()

    def _in_loop(self, action: Callable[[ShardLoop], _T], context: grpc.ServicerContext) -> _T:
        """Runs `action` in the loop; ends the call if the loop has ended, or does not get to it in time."""
        self._await_ready(context)
        return self._result(self._loop.command(lambda: action(self._loop)), context)

    def _await_ready(self, context: grpc.ServicerContext) -> None:
        if not self._ready.wait(context.time_remaining()):
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "this shard has not joined its server yet")

    def _result(self, future: Future[_T], context: grpc.ServicerContext) -> _T:
        try:
            return future.result(context.time_remaining())
        except CancelledError:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"shard {self._index} is exiting")
        except TimeoutError:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"shard {self._index} is busy")


def _if_wanted(act: Action, context: grpc.ServicerContext) -> Action:
    """Returns an action that does nothing if its coordinator was killed; the next one calls again."""
    return lambda loop: act(loop) if context.is_active() else None
