"""The gRPC service `Control`, which workers, shards and command lines call.

It only translates messages; the coordinator acts on them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlServicer
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.joining import Summons
from hubring.ps.core.errors import ConfigError, Fenced, HubringError, UsageError
from hubring.ps.core.peer_text import clean, clean_message
from hubring.ps.core.rejections import Reason as Rejection
from hubring.ps.core.types import Sender, Slicing, incarnation_from_wire, incarnation_to_wire
from hubring.ps.job import peer_request, telemetry
from hubring.ps.job.job import Reason
from hubring.ps.job.plan_protos import slice_to_proto
from hubring.ps.security.keyring import Keyring
from hubring.ps.security.policy import Role
from hubring.ps.transport.host import reachable

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

STATUS_SECONDS = 5.0
"""How long a status waits for a shard that does not answer. The caller waits twice as long."""


class Control(ControlServicer):
    """Serves `Control` for one coordinator.

    Args:
        coordinator: Acts on the messages.
        keyring: The server's tokens; None if it asks for none.
    """

    def __init__(self, coordinator: Coordinator, keyring: Keyring | None = None) -> None:
        self._coordinator = coordinator
        self._keyring = keyring

    def _count_if_bounded(self, what: str, error: HubringError) -> bool:
        """Counts a refusal, and logs it rarely, if its reason is a bound. Returns whether it is."""
        if bounded := isinstance(error, peer_request.Rejected):
            self._count(error.reason, f"{what}: {error}")
        return bounded

    def _count(self, reason: Rejection, text: str) -> None:
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
            joiner = peer_request.joiner(request)
            seat = await self._coordinator.join(joiner)
        except asyncio.CancelledError:  # the worker is gone
            self._coordinator.connections.abandon(request.token)
            raise
        except HubringError as error:
            what = f"refused the worker on {clean(request.host)} (pid {request.pid})"
            if not self._count_if_bounded(what, error):
                log.warning("%s: %s", what, error)
            return pb.JoinReply(state=pb.JoinReply.REFUSED, text=str(error), exit_code=error.exit_code)
        config = self._coordinator.config
        if seat is None:
            text = self._coordinator.quorum.awaited(joiner)
            return pb.JoinReply(state=pb.JoinReply.WAITING, text=text, silent_seconds=config.silent_seconds)
        if isinstance(seat, Summons):
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
        try:
            self._coordinator.check_member(_sender(request))
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return pb.ShardsReply(shards=self._addresses())

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
        failure = job.failure
        ring = job.generations
        live = frozenset(job.members) if ring.heals else frozenset()
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
        )

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> AsyncIterator[pb.Ack]:
        try:
            await self._coordinator.connections.hold(_sender(request), request.shard)
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        yield pb.Ack()

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        sender, departures = _sender(request), self._coordinator.departures
        try:
            news = await self._coordinator.leave(
                sender, Reason(request.reason), clean_message(request.text), request.step
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
            offered = peer_request.buckets(request.buckets)
            if request.trial:
                trial = await self._coordinator.try_plan(_sender(request), offered, request.slice_bytes)
                return pb.PlanReply(slices=[slice_to_proto(piece) for piece in trial.slices])
            slicing = Slicing(request.slice_bytes, request.shards) if request.slice_bytes else None
            step = await self._coordinator.plan(_sender(request), offered, slicing)
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except HubringError as error:
            self._count_if_bounded(f"refused the buckets of rank {request.rank}", error)
            return pb.PlanReply(refused=str(error), exit_code=error.exit_code)
        agreed_model = self._coordinator.agreed_model
        return pb.PlanReply(
            slices=[slice_to_proto(piece) for piece in agreed_model.plan.slices],
            step=step,
            initialised=agreed_model.initialised(offered),
            undecided=agreed_model.undecided,
        )

    async def Rendezvous(self, request: pb.RendezvousRequest, context: Context) -> pb.RendezvousReply:
        try:
            self._coordinator.check_member(_sender(request))
            board, value = self._coordinator.rendezvous, request.value
            if request.forget:
                board.forget(request.forget)
                return pb.RendezvousReply()
            if value:
                await board.pin(request.rank, request.key, value)
                return pb.RendezvousReply(value=value)
            job = self._coordinator.job

            def ended() -> bool:
                return job.generations.has_ended(request.generation, job.members)

            value = await board.find(request.key, request.wait_seconds, ended)
        except Fenced as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except UsageError as error:
            self._count("board", f"refused what rank {request.rank} publishes: {error}")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        if not value:
            return pb.RendezvousReply(broken=ended())
        return pb.RendezvousReply(value=value, folder=board.folder(request.key))

    async def Regroup(self, request: pb.RegroupRequest, context: Context) -> pb.RegroupReply:
        try:
            self._coordinator.check_member(_sender(request))
            generation = await self._coordinator.meeting.regroup(
                _sender(request),
                request.generation,
                peer_request.note(request.note),
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

    async def Clock(self, request: pb.ClockRequest, context: Context) -> pb.ClockReply:
        return pb.ClockReply(time_ns=time.time_ns())

    # People.

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        return pb.StatusReply(json=json.dumps(await self._coordinator.status(STATUS_SECONDS)))

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointReply:
        try:
            path, step = await self._coordinator.save()
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
            checked = peer_request.shard(request, proves=not config.insecure)
            shard = await self._coordinator.register_shard(checked)
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
        ruling = self._coordinator.standbys.ruling(
            request.token, request.stream, unreachable=request.unreachable
        )
        return pb.ShardHeartbeatReply(stop=not stays, dismissed=ruling.dismissed, given_up=ruling.given_up)


def _sender(
    request: pb.HeartbeatRequest
    | pb.ConnectRequest
    | pb.LeaveRequest
    | pb.PlanRequest
    | pb.RendezvousRequest
    | pb.ShardsRequest
    | pb.RegroupRequest,
) -> Sender:
    return Sender(request.rank, incarnation_from_wire(request.incarnation))
