"""What workers exchange through their server: the shards' addresses, what they publish, and their states.

A shard that is lost moves to its standby. A worker's own state is sent for a checkpoint, and read back by a
worker that starts. `hubring.ps.coordinator.worker_states` stores it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import grpc

from hubring.protos import control_pb2 as pb
from hubring.ps.client.server_calls import MemberCalls
from hubring.ps.core.bounds import clean_message
from hubring.ps.core.errors import (
    BY_EXIT_CODE,
    CheckpointCorrupt,
    DeadlineExceeded,
    JobFailed,
    RingBroken,
    ShardAwaited,
)
from hubring.ps.security.certificate import Identity
from hubring.ps.transport.registry import ShardAddress

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0
"""How long the coordinator may take to answer. The caller asks again."""


class ShardLocations:
    """The addresses of the shards. Safe from any thread.

    Args:
        calls: The worker's calls to the coordinator.
        shards: The addresses at the start of the job.
        own: The certificate that the worker shows to shards; None for none.

    Attributes:
        shards: The last known addresses, in the order of the shards' numbers.
    """

    def __init__(
        self, calls: MemberCalls, shards: Iterable[pb.ShardAddress], own: Identity | None = None
    ) -> None:
        self._own = own
        self.shards = list(map(self._address, shards))
        self._calls = calls
        self._failovers, self._missing = 0, False
        self.on_move: Callable[[int], None] = lambda _: None
        """Called with the number of each shard that has moved, in the heartbeat's thread."""

    def locate(self, number: int) -> ShardAddress:
        """Asks where a shard is; returns the last known address if the coordinator does not answer.

        Raises:
            ShardAwaited: Shards are missing: the job waits for a worker that brings one.
        """
        self._refresh()
        if self._missing:
            raise ShardAwaited(f"shard {number} is missing until its worker is replaced")
        return self.shards[number]

    def note(self, failovers: int) -> None:
        """Notes how often a standby has replaced a shard, from the reply to a heartbeat."""
        if failovers == self._failovers:
            return
        before = list(self.shards)
        if self._refresh():
            self._failovers = failovers
        for number, (old, new) in enumerate(zip(before, self.shards, strict=True)):
            if new != old:
                self.on_move(number)

    def _refresh(self) -> bool:
        """Returns whether the coordinator answered."""
        request = pb.ShardsRequest(**self._calls.member)
        try:
            reply = self._calls.stub.Shards(request, timeout=ASK_SECONDS)
        except grpc.RpcError as error:
            log.debug("the coordinator did not return the shards' addresses: %s", error.code().name)
            return False
        self._missing = len(reply.shards) < len(self.shards)
        if len(reply.shards) == len(self.shards):
            self.shards[:] = map(self._address, reply.shards)
            return True
        return False

    def _address(self, shard: pb.ShardAddress) -> ShardAddress:
        return ShardAddress.from_proto(shard, self._own)


LOOK_SECONDS = 2.0
"""How long one call waits."""


class RingMember(NamedTuple):
    """A member of a ring that heals.

    Attributes:
        rank: Its rank in the job, which it keeps.
        note: What it tells the others.
        newcomer: Whether it has just entered.
    """

    rank: int
    note: str
    newcomer: bool


class RingGeneration(NamedTuple):
    """A generation of a ring that heals.

    Attributes:
        members: In the order of their ranks in the ring.
        boundary: Whether all members are between the same two steps.
    """

    number: int
    members: tuple[RingMember, ...]
    boundary: bool


class Board:
    """One worker's view of what the workers of its job tell each other.

    Args:
        calls: The worker's calls to its server.
        patience: Seconds that the server may take beyond the wait.
    """

    def __init__(self, calls: MemberCalls, patience: float) -> None:
        self._calls = calls
        self._patience = patience

    def publish(self, key: str, value: str) -> None:
        """Publishes `value` under `key` for the other workers."""
        self._rendezvous(key=key, value=value)

    def lookup(self, key: str, timeout: float) -> str:
        """Waits for the value that a worker publishes under `key`, and returns it.

        Raises:
            DeadlineExceeded: No worker published it within `timeout` seconds.
        """
        return self.look_around(key, timeout)[key]

    def look_around(self, key: str, timeout: float, generation: int = 0) -> Mapping[str, str]:
        """Waits for the value under `key`, and returns it with others of its folder, by key.

        Args:
            key: `FOLDER/NAME`, or a name without a folder.
            timeout: Seconds that it may take.
            generation: The generation of a ring that heals whose members look for each other; 0 for none.

        Raises:
            DeadlineExceeded: No worker published it within `timeout` seconds.
            RingBroken: The generation must end, because a member is lost.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0 and self._calls.failure() is None:
            reply = self._rendezvous(key=key, generation=generation, wait_seconds=min(left, LOOK_SECONDS))
            if reply.value:
                folder = "".join(key.rpartition("/")[:2])
                return {key: reply.value, **{folder + name: value for name, value in reply.folder.items()}}
            if reply.broken:
                raise RingBroken("a member of the ring is lost")
        raise self._calls.failure() or DeadlineExceeded(
            f"no rank published {key!r} within {timeout:g} s (--timeout)"
        )

    def forget(self, folder: str) -> None:
        """Removes what workers published under the keys of a folder."""
        self._rendezvous(forget=folder)

    def regroup(self, generation: int, note: str, *, boundary: bool) -> RingGeneration:
        """Waits for the next generation of a ring that heals, without a limit: a member may be busy.

        Args:
            generation: The generation that this worker leaves; 0 for none.
            note: What the other members must know.
            boundary: Whether this worker is between two steps, where newcomers can enter.

        Raises:
            HubringError: The job has failed, this worker has lost its place, or the server is gone.
        """
        request = pb.RegroupRequest(
            **self._calls.member,
            generation=generation,
            boundary=boundary,
            note=note,
            wait_seconds=LOOK_SECONDS,
        )
        while (failure := self._calls.failure()) is None:
            reply = self._calls.make(self._calls.stub.Regroup, request, LOOK_SECONDS + self._patience)
            if reply.failed:
                raise BY_EXIT_CODE.get(reply.exit_code, JobFailed)(clean_message(reply.failed))
            if reply.generation:
                members = (RingMember(one.rank, one.note, one.newcomer) for one in reply.members)
                return RingGeneration(reply.generation, tuple(members), reply.boundary)
        raise failure

    def _rendezvous(self, **fields: Any) -> pb.RendezvousReply:
        request = pb.RendezvousRequest(**self._calls.member, **fields)
        patience = request.wait_seconds + self._patience
        reply: pb.RendezvousReply = self._calls.make(self._calls.stub.Rendezvous, request, patience)
        return reply


PART_BYTES = 1 << 20
CALL_SECONDS = 60.0
STATE_LOOK_SECONDS = 0.1
READS = 4
"""How often a worker reads a state that a newer one replaces meanwhile."""


class KeptState(NamedTuple):
    """What a worker starts with.

    Attributes:
        own: A rank's state; empty if there is none.
        shared: What all ranks have alike; empty if there is none.
        mine: Whether `own` is this rank's, and not another one's.
    """

    own: bytes = b""
    shared: bytes = b""
    mine: bool = False


class KeptStates:
    """Sends and reads states of one worker.

    Args:
        calls: The worker's calls to its server.
    """

    def __init__(self, calls: MemberCalls) -> None:
        self._shared_too = False
        self._on_want: Callable[[], None] = lambda: None
        self._on_blocked: Callable[[], None] = lambda: None
        self._calls = calls

    def follow(self, on_want: Callable[[], None], on_blocked: Callable[[], None]) -> None:
        """Sets what happens if the server wants this worker's state. Any thread calls these functions.

        Args:
            on_want: Makes the worker send it after this step.
            on_blocked: Sends it at once: the training thread is blocked, so it leaves the state alone.
        """
        self._on_want, self._on_blocked = on_want, on_blocked

    def want(self) -> None:
        """A checkpoint has the step that is about to end."""
        self._on_want()

    def ask(self, *, shared: bool, blocked: bool) -> None:
        """The server asks for the state, and maybe for what all ranks have alike."""
        self._shared_too |= shared
        (self._on_blocked if blocked else self._on_want)()

    def take_wish(self) -> bool:
        """Returns, once, whether the server wants what all ranks have alike from this worker too."""
        wish, self._shared_too = self._shared_too, False
        return wish

    def announce(self) -> None:
        """Tells the server that this worker sends its state, so that checkpoints wait for it."""
        self._keep()

    def send(self, content: memoryview, step: int, *, shared: bool) -> None:
        """Sends a state, in parts. Logs why the server does not keep it. Raises as `Board.publish`."""
        for offset in range(0, max(1, len(content)), PART_BYTES):
            reply = self._keep(
                shared=shared,
                step=step,
                offset=offset,
                content=bytes(content[offset : offset + PART_BYTES]),
                last=offset + PART_BYTES >= len(content),
            )
            if reply.refused:
                log.error("the checkpoint of step %d lacks this rank's state: %s", step, reply.refused)
                return

    def _keep(self, **part: Any) -> pb.KeepReply:
        request = pb.KeepRequest(**self._calls.member, **part)
        reply: pb.KeepReply = self._calls.make(self._calls.stub.Keep, request, CALL_SECONDS)
        return reply

    def fetch(self, *, live: bool, timeout: float) -> KeptState:
        """Returns the state from which this worker starts; empty after `timeout` seconds without one.

        Args:
            live: Ask a live worker first: this one joins a running job.
            timeout: Seconds.

        Raises:
            CheckpointCorrupt: The server has the state, but it cannot be read.
        """
        deadline = time.monotonic() + timeout
        for _ in range(READS):
            while (found := self._get(live=live)).waits and time.monotonic() < deadline:
                time.sleep(STATE_LOOK_SECONDS)
            own, shared = self._read(found.own), self._read(found.shared)
            if own is not None and shared is not None:
                return KeptState(own, shared, found.mine)
        raise CheckpointCorrupt(
            f"the server cannot read {found.own if own is None else found.shared}, from which this worker"
            " starts: the server's log says why"
        )

    def _read(self, name: str) -> bytes | None:
        """Returns a state; None if the server has not all of it any more."""
        content, total = bytearray(), 0
        while name:
            part = self._get(name=name, offset=len(content))
            content += part.content
            total = total or part.total
            if part.total != total or total < 0 or (not part.content and len(content) < total):
                return None
            if len(content) >= total:
                break
        return bytes(content)

    def _get(self, *, live: bool = False, name: str = "", offset: int = 0) -> pb.KeptReply:
        request = pb.KeptRequest(**self._calls.member, live=live, name=name, offset=offset)
        reply: pb.KeptReply = self._calls.make(self._calls.stub.Kept, request, CALL_SECONDS)
        return reply
