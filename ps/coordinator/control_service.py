"""The gRPC service `Control`, which workers, shards and command lines call.

It only translates messages; the coordinator acts on them. Calls whose message cannot be read are refused,
since gRPC would print a traceback for each.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlServicer
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.joining import ShardWanted
from hubring.ps.coordinator.status import StatusReporter
from hubring.ps.core.bounds import RejectionReason, Rejections, clean, clean_message
from hubring.ps.core.errors import ConfigError, Fenced, HubringError, UsageError
from hubring.ps.core.types import Sender, Slicing, incarnation_from_wire, incarnation_to_wire
from hubring.ps.job import control_messages, telemetry
from hubring.ps.job.control_messages import slices_to_proto
from hubring.ps.job.generations import MEETING
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.security.guard import Role
from hubring.ps.security.keyring import Keyring
from hubring.ps.transport.grpc.newcomers import GrpcNewcomers
from hubring.ps.transport.host import reachable

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_OfMember = (
    pb.HeartbeatRequest
    | pb.LeaveRequest
    | pb.PlanRequest
    | pb.RendezvousRequest
    | pb.ShardsRequest
    | pb.RegroupRequest
    | pb.KeepRequest
    | pb.KeptRequest
)

STATUS_SECONDS = 5.0
"""How long a status waits for a shard that does not answer. The caller waits twice as long."""


class Control(ControlServicer):
    """Serves `Control` for one coordinator.

    Args:
        coordinator: Acts on the messages.
        reporter: Tells its status.
        keyring: The server's tokens; None if it asks for none.
    """

    def __init__(
        self, coordinator: Coordinator, reporter: StatusReporter, keyring: Keyring | None = None
    ) -> None:
        self._coordinator, self._reporter = coordinator, reporter
        self._keyring = keyring

    def _count_if_bounded(self, what: str, error: HubringError) -> bool:
        """Counts a refusal, and logs it rarely, if its reason is a bound. Returns whether it is."""
        if bounded := isinstance(error, control_messages.RejectedRequest):
            self._count(error.reason, f"{what}: {error}")
        return bounded

    def _count(self, reason: RejectionReason, text: str) -> None:
        self._coordinator.counters.rejections.add(reason, log, text)

    async def _refuse_expired(self, token: str, context: Context) -> None:
        """Ends the call of a new process whose secret is from before a rotation of the tokens."""
        if self._keyring is None:
            return
        if why := self._keyring.guard.expired_for(token, tuple(context.invocation_metadata() or ())):
            self._count("token", f"refused a worker or a shard that asks to join: {why}")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    # Workers.

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        await self._refuse_expired(request.token, context)
        try:
            joiner = control_messages.checked_joiner(request)
            seat = await self._coordinator.join(joiner)
        except HubringError as error:
            what = f"refused the worker on {clean(request.host)} (pid {request.pid})"
            if not self._count_if_bounded(what, error):
                log.warning("%s: %s", what, error)
            return pb.JoinReply(state=pb.JoinReply.REFUSED, text=str(error), exit_code=error.exit_code)
        config = self._coordinator.config
        if seat is None:
            text = self._coordinator.quorum.awaited(joiner)
            return pb.JoinReply(state=pb.JoinReply.WAITING, text=text, silent_seconds=config.silent_seconds)
        if isinstance(seat, ShardWanted):
            return pb.JoinReply(
                state=pb.JoinReply.BRING_SHARD,
                incarnation=incarnation_to_wire(seat.member.incarnation),
                server_host=reachable(config.host),
                insecure=config.insecure,
                plain_data=config.plain_data,
                silent_seconds=config.silent_seconds,
                shard_secret=self._keyring.secret(Role.SHARD) if self._keyring else "",
            )
        return pb.JoinReply(
            state=pb.JoinReply.READY,
            rank=seat.member.rank,
            incarnation=incarnation_to_wire(seat.member.incarnation),
            world_size=seat.world_size,
            lease_seconds=config.lease,
            silent_seconds=config.silent_seconds,
            ring_size=len(self._coordinator.job.generations.current.arrivals),
            late=seat.late,
            neighbours=seat.neighbours,
            mode=config.mode,
            saves=config.checkpoint_dir is not None,
            lockstep=self._coordinator.consistency.lockstep,
            shards=self._addresses(),
        )

    async def Shards(self, request: pb.ShardsRequest, context: Context) -> pb.ShardsReply:
        await self._check_member(request, context)
        return pb.ShardsReply(shards=self._addresses())

    async def _check_member(self, request: _OfMember, context: Context) -> None:
        try:
            self._coordinator.check_member(_sender(request))
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))

    def _addresses(self) -> list[pb.ShardAddress]:
        return [shard.to_proto() for shard in self._coordinator.fleet.shards]

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        try:
            sent = telemetry.from_proto(request.telemetry)
            news = self._coordinator.beat(_sender(request), request.step, request.loss, request.waiting, sent)
            if request.shard_ended:
                self._coordinator.shard_ended(_sender(request), clean(request.shard_ended))
            if request.stopping:
                await self._coordinator.stop_with(_sender(request))
            agreed = self._coordinator.job.stop(_sender(request), request.stop_after)
        except Fenced as error:
            return pb.HeartbeatReply(fenced=True, failed=str(error), exit_code=error.exit_code)
        job = self._coordinator.job
        failure, ring = job.failure, job.generations
        live = frozenset(job.members) if ring.heals else frozenset()
        keep, keep_shared = self._coordinator.checkpoints.states.wish(request.rank)
        return pb.HeartbeatReply(
            failed=str(failure or ""),
            exit_code=failure.exit_code if failure else 0,
            news=news,
            slowest=job.slowest() if request.waiting else "",  # only if needed: it reads the progress of all
            draining=job.draining and job.topology == "ring",
            stop_after=job.stop_after,
            stop_agreed=agreed,
            finished=job.finished(_sender(request)),
            failovers=self._coordinator.standbys.failovers,
            broken=ring.broken(live),
            newcomers=bool(ring.newcomers(live)),
            keep=keep,
            keep_shared=keep_shared,
        )

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> AsyncIterator[pb.Ack]:
        if len(request.token) in (control_messages.WORKER_TOKEN, control_messages.SHARD_TOKEN):
            await self._coordinator.connections.hold(request.token)
        yield pb.Ack()

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        sender, departures = _sender(request), self._coordinator.departures
        try:
            news = await self._coordinator.leave(
                sender, LeaveReason(request.reason), clean_message(request.text), request.step
            )
        except Fenced as error:
            return pb.LeaveReply(failed=str(error), exit_code=error.exit_code)
        if request.heard:
            await departures.heard(sender)
            return pb.LeaveReply()
        verdict = await departures.await_verdict(sender, request.wait_seconds)
        if verdict is None:
            return pb.LeaveReply(news=news, awaits=departures.awaited())
        return pb.LeaveReply(news=news, failed=verdict.error, exit_code=verdict.exit_code)

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanReply:
        try:
            offered = await asyncio.to_thread(control_messages.checked_buckets, request.buckets)
            if request.trial:
                draw = self._coordinator.planner.try_out
                trial, later = await draw(_sender(request), offered, request.slice_bytes, request.trial)
                reply = pb.PlanReply(step=later)
                reply.MergeFrom(await asyncio.to_thread(slices_to_proto, trial))
                return reply
            slicing = Slicing(request.slice_bytes, request.shards) if request.slice_bytes else None
            step = await self._coordinator.plan(_sender(request), offered, slicing, request.step)
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except HubringError as error:
            self._count_if_bounded(f"refused the buckets of rank {request.rank}", error)
            return pb.PlanReply(refused=str(error), exit_code=error.exit_code)
        model = self._coordinator.agreed_model
        reply = pb.PlanReply(step=step or 0, initialised=model.initialised(offered), undecided=step is None)
        reply.MergeFrom(await asyncio.to_thread(slices_to_proto, model.plan))
        return reply

    async def Rendezvous(self, request: pb.RendezvousRequest, context: Context) -> pb.RendezvousReply:
        await self._check_member(request, context)
        board, job, value = self._coordinator.rendezvous, self._coordinator.job, request.value
        if request.forget:
            board.forget(request.forget)
            return pb.RendezvousReply()
        if value:
            try:
                await board.pin(request.rank, request.key, value)
            except UsageError as error:
                self._count("board", f"refused what rank {request.rank} publishes: {error}")
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            return pb.RendezvousReply(value=value)

        meets, meeting = request.key.startswith(MEETING), self._coordinator.meeting

        def ended() -> bool:
            alone = meets and bool(job.finished(_sender(request)))
            return alone or job.generations.has_ended(request.generation, job.members)

        ready = (lambda: meeting.has_met(board)) if meets else lambda: True
        value = await board.find(request.key, request.wait_seconds, ended, ready)
        if not value:
            return pb.RendezvousReply(broken=ended())
        return pb.RendezvousReply(value=value, folder=board.folder(request.key))

    async def Regroup(self, request: pb.RegroupRequest, context: Context) -> pb.RegroupReply:
        try:
            self._coordinator.check_member(_sender(request))
            generation = await self._coordinator.meeting.regroup(
                _sender(request),
                request.generation,
                control_messages.checked_note(request.note),
                request.wait_seconds,
                boundary=request.boundary,
            )
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except HubringError as error:
            self._count_if_bounded(f"refused the note of rank {request.rank}", error)
            return pb.RegroupReply(failed=str(error), exit_code=error.exit_code)
        if generation is None:
            return pb.RegroupReply()
        return pb.RegroupReply(
            generation=generation.number,
            members=[
                pb.RingMember(rank=one.member.rank, note=one.note, newcomer=one.newcomer)
                for one in generation.arrivals
            ],
            boundary=generation.boundary,
        )

    async def Keep(self, request: pb.KeepRequest, context: Context) -> pb.KeepReply:
        await self._check_member(request, context)
        refused = await asyncio.to_thread(self._coordinator.checkpoints.states.take, request)
        return pb.KeepReply(refused=refused)

    async def Kept(self, request: pb.KeptRequest, context: Context) -> pb.KeptReply:
        await self._check_member(request, context)
        restored, membership = self._coordinator.agreed_model.restored, self._coordinator.job.membership
        live = () if membership is None else membership.active
        return self._coordinator.checkpoints.states.answer(request, restored and restored[0], live)

    async def Clock(self, request: pb.ClockRequest, context: Context) -> pb.ClockReply:
        return pb.ClockReply(time_ns=time.time_ns())

    # People.

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        return pb.StatusReply(json=json.dumps(await self._reporter.status(STATUS_SECONDS)))

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointReply:
        try:
            path, step = await self._coordinator.checkpoints.save()
        except HubringError as error:
            return pb.CheckpointReply(refused=str(error))
        return pb.CheckpointReply(path=str(path), step=step)

    async def RotateToken(self, request: pb.RotateTokenRequest, context: Context) -> pb.RotateTokenReply:
        if self._keyring is None:
            return pb.RotateTokenReply(refused="this server runs with --insecure and has no tokens")
        try:
            self._keyring.rotate()
        except ConfigError as error:
            return pb.RotateTokenReply(refused=str(error))
        return pb.RotateTokenReply(path=str(self._keyring.path))

    # Shards.

    async def RegisterShard(
        self, request: pb.RegisterShardRequest, context: Context
    ) -> pb.RegisterShardReply:
        await self._refuse_expired(request.token, context)
        try:
            config = self._coordinator.config
            checked = control_messages.checked_shard(request, proves=not config.insecure)
            shard = await self._coordinator.quorum.register(checked)
        except ConfigError as error:
            self._count_if_bounded(f"refused the shard on {clean(request.host)} (pid {request.pid})", error)
            return pb.RegisterShardReply(refused=str(error))
        if shard is None:
            return pb.RegisterShardReply()  # lease 0: a job is running; the shard asks again
        return pb.RegisterShardReply(
            shard=shard.index,
            lease_seconds=config.lease,
            mode=config.mode,
            staleness=config.staleness,
            backup=config.backup,
            allow_nonfinite=config.nonfinite == "allow",
            silent_seconds=config.silent_seconds,
        )

    async def ShardHeartbeat(
        self, request: pb.ShardHeartbeatRequest, context: Context
    ) -> pb.ShardHeartbeatReply:
        stays = self._coordinator.beat_shard(request.token)
        reply = self._coordinator.standbys.answer(request)
        reply.stop = not stays
        return reply


def _sender(request: _OfMember) -> Sender:
    return Sender(request.rank, incarnation_from_wire(request.incarnation))


UNREADABLE = "the call's message cannot be read: it was damaged on its way; call again"


class ReadableCalls(grpc.aio.ServerInterceptor):
    """Ends such calls of a server of an event loop with DATA_LOSS; counts and logs them.

    It leaves alone calls that send a stream of messages, or whose method returns no iterator of replies.

    Args:
        rejections: Counts the calls.
        newcomers: Learns whose calls were let in; None if it does not watch the server.
    """

    def __init__(self, rejections: Rejections, newcomers: GrpcNewcomers | None = None) -> None:
        self._rejections, self._newcomers = rejections, newcomers

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        handler = await continuation(call)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        reads = handler._replace(request_deserializer=_tolerant(handler.request_deserializer))
        if handler.unary_unary is not None:
            return reads._replace(unary_unary=self._one_reply(handler.unary_unary, call.method))
        if inspect.isasyncgenfunction(handler.unary_stream):
            return reads._replace(unary_stream=self._replies(handler.unary_stream, call.method))
        return handler

    def _one_reply(self, method: Callable[[Any, Any], Awaitable[Any]], name: str) -> Any:
        async def reply(request: Any, context: Any) -> Any:
            await self._check(request, context, name)
            return await method(request, context)

        return reply

    def _replies(self, method: Callable[[Any, Any], AsyncIterator[Any]], name: str) -> Any:
        async def replies(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(request, context, name)
            async for each in method(request, context):
                yield each

        return replies

    async def _check(self, request: Any, context: Any, name: str) -> None:
        if self._newcomers is not None:
            self._newcomers.admit(context.peer())
        if isinstance(request, DecodeError):
            self._rejections.add("message", log, f"refused a call of {name}: its message cannot be read")
            await context.abort(grpc.StatusCode.DATA_LOSS, UNREADABLE)


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a deserializer that returns the error in place of a message that cannot be read."""

    def deserialize(content: bytes) -> Any:
        try:
            return read(content)
        except DecodeError as error:
            return error

    return deserialize
