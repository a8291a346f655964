"""A worker's own state on its server: sent for a checkpoint, and read back by a worker that starts.

`hubring.ps.coordinator.worker_states` stores it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from hubring.protos import control_pb2 as pb
from hubring.ps.client.server_calls import MemberCalls
from hubring.ps.core.errors import CheckpointCorrupt

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
CALL_SECONDS = 60.0
LOOK_SECONDS = 0.1
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
                time.sleep(LOOK_SECONDS)
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
