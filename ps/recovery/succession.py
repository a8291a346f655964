"""How a server's state passes from a coordinator that is killed to its standby: by a file.

Law: a reader of the file finds a whole state or none. The first line has the digest of the rest. A rename
replaces the file, which is not flushed to the disk: it must survive the death of a process, not of the
host. Only its user can read it, because it has the secrets of the server and its members.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args, get_origin

import grpc
import msgspec
from msgspec.structs import replace

from hubring.protos.control_pb2 import DESCRIPTOR
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import HubringError
from hubring.ps.process.child import Child
from hubring.ps.recovery.coordinator_state import ServerState
from hubring.ps.recovery.guardian import CoordinatorSettings, ServerReport, start_coordinator
from hubring.ps.security import private_file
from hubring.ps.security.token_file import runtime_file

_KIND = "hubring-state-4"


class StateDamaged(HubringError):
    """The state of a server that was killed cannot be read."""

    exit_code = 69


class StateFile:
    """The file of one server.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, state: bytes) -> None:
        """Replaces the state. Raises OSError if it cannot be written."""
        private_file.replace(self.path, f"{_KIND} {_digest(state)}\n".encode() + state)

    def read(self) -> ServerState:
        """Returns the state.

        Raises:
            StateDamaged: The file is missing, torn or changed.
        """
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
            if head != f"{_KIND} {_digest(body)}".encode():
                raise ValueError("its digest differs")
            return decode_state(body)
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise StateDamaged(
                f"cannot take over the server: {self.path} is missing or damaged ({error}). Restart the"
                " server with the same --checkpoint-dir, then restart the workers"
            ) from error

    def remove(self) -> None:
        """Deletes the state, or at least what the file holds."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, 0)


def encode_state(value: object) -> bytes:
    """Returns a record as JSON, which has integers of any size: incarnations have 192 bits."""
    return msgspec.json.encode(value, enc_hook=_plain)


def decode_state(data: bytes) -> ServerState:
    """Returns the state of `encode`. Raises ValueError if it is none."""
    return msgspec.json.decode(data, type=ServerState, dec_hook=_typed)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value)


def _typed(kind: type[Any], value: Any) -> Any:
    if get_origin(kind) is Counter:
        (key,) = get_args(kind)
        return Counter(msgspec.convert(value, dict[key, int], str_keys=True))  # type: ignore[valid-type]
    return kind(value)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


log = logging.getLogger(__name__)

_CONTROL = f"/{DESCRIPTOR.services_by_name['Control'].full_name}/"

_ROUTINE: Mapping[str, frozenset[str]] = {
    "Heartbeat": frozenset({"rank", "incarnation", "step", "loss", "waiting", "telemetry"}),
    "ShardHeartbeat": frozenset({"token", "stream", "stalled"}),
    "Rendezvous": frozenset({"rank", "incarnation", "key", "wait_seconds"}),
    "Clock": frozenset(),
    "Status": frozenset(),
}
"""The fields of requests that change nothing worth writing, by RPC. Most calls are such."""


class Commits:
    """Writes the state of one server.

    A state of thousands of workers takes some 10 ms. So calls that are answered at the same time share a
    commit, and commits take at most a tenth of a core, or a hundredth while there are no calls.

    Args:
        file: Where to.
        capture: Returns the current state.
    """

    def __init__(self, file: StateFile, capture: Callable[[], ServerState]) -> None:
        self._file = file
        self._capture = capture
        self._written = b""
        self._failed = False
        self._began = self._took = 0.0
        self._next: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Returns once the present state is written."""
        if self._next is None:
            self._next = asyncio.create_task(self._commit_soon())
        await asyncio.shield(self._next)

    def commit_in_passing(self) -> None:
        """Commits, unless the last commit took long and was not long ago."""
        if time.monotonic() - self._began > 100 * self._took:
            self.commit()

    def commit(self) -> None:
        """Writes the state if it differs from the written one in more than the workers' steps."""
        self._began, worked = time.monotonic(), time.thread_time()
        self._write()
        self._took = time.thread_time() - worked  # a wait for a core must not delay later answers too

    async def _commit_soon(self) -> None:
        await asyncio.sleep(9 * self._took)
        self._next = None
        self.commit()

    def _write(self) -> None:
        state = self._capture()
        compared = encode_state(replace(state, steps={}))
        if compared == self._written:
            return
        try:
            self._file.write(encode_state(state))
        except OSError as error:
            self._fail(error)
        else:
            self._written, self._failed = compared, False

    def _fail(self, error: OSError) -> None:
        self._file.remove()  # a standby must not continue with an old state
        self._written = b""
        if not self._failed:
            log.error(
                "cannot write %s (%s): while that lasts, the job ends if the coordinator is killed",
                self._file.path,
                error.strerror,
            )
        self._failed = True


class CommitFirst(grpc.aio.ServerInterceptor):
    """Commits before each reply that may tell of a change.

    Args:
        settle: Returns once the present state is written.
    """

    def __init__(self, settle: Callable[[], Awaitable[None]]) -> None:
        self._settle = settle

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        handler = await continuation(call)
        if handler is None or handler.unary_unary is None or not call.method.startswith(_CONTROL):
            return handler
        routine = _ROUTINE.get(call.method.removeprefix(_CONTROL))

        async def answer(request: Any, context: Any) -> Any:
            reply = await handler.unary_unary(request, context)
            if routine is None or not routine.issuperset(field.name for field, _ in request.ListFields()):
                await self._settle()
            return reply

        return grpc.unary_unary_rpc_method_handler(
            answer, handler.request_deserializer, handler.response_serializer
        )


AGAIN_SECONDS = 5.0
"""A standby that ends is replaced at most this often."""
ORPHAN_SECONDS = 20.0
"""How long workers may take to join once the guardian is gone: a launcher starts both at the same time."""


class Succession:
    """A coordinator's ties to its guardian, its predecessor and its standby.

    Args:
        settings: The settings of this process.
        inherited: The state of the coordinator that this process replaces; None for the first one.
    """

    def __init__(self, settings: CoordinatorSettings, inherited: ServerState | None) -> None:
        self.inherited = inherited
        self._orphaned = math.inf
        """When the guardian was killed, in monotonic seconds."""
        self._settings = settings
        self._commits: Commits | None = None
        self._file: StateFile | None = None
        self._standby: Child | None = None
        self._started = -AGAIN_SECONDS

    def begin(self, port: int, fleet: Fleet, capture: Callable[[], ServerState]) -> None:
        """Writes the state from now on.

        Args:
            port: The server's port, after which the state file is named.
            fleet: The shards. The state is written before each call that changes them.
            capture: Returns the server's state.

        Raises:
            ConfigError: The user's runtime directory cannot be used.
        """
        self._file = StateFile(runtime_file(port).with_suffix(".state"))
        self._commits = Commits(self._file, capture)
        self._commits.commit()
        fleet.before_call = self._commits.commit

    async def settle(self) -> None:
        """Returns once the present state is written."""
        assert self._commits is not None
        await self._commits.settle()

    def watch(self) -> None:
        """Writes the state if it changed, and starts a standby if none runs."""
        assert self._commits is not None
        self._commits.commit_in_passing()
        if self._standby is not None and not self._standby.ended:
            return
        if time.monotonic() - self._started < AGAIN_SECONDS:
            return
        if self._standby is not None:
            log.warning("%s %s; another one starts", self._standby, self._standby.ended)
        assert self._file is not None
        self._started = time.monotonic()
        self._standby = start_coordinator(
            "the coordinator's standby",
            replace(self._settings, predecessor=os.getpid(), state=str(self._file.path)),
        )

    def listen(self, act: Callable[[int], None], leave: Callable[[], None]) -> None:
        """Reads the guardian's orders on the running loop.

        Args:
            act: Called with the number of each signal that the guardian received.
            leave: Called once the guardian has ended.
        """
        loop, left = asyncio.get_running_loop(), b""

        def read() -> None:
            nonlocal left
            chunk = os.read(self._settings.orders, 4096)
            *lines, left = (left + chunk).split(b"\n")
            for line in lines:
                act(int(line))
            if not chunk:
                loop.remove_reader(self._settings.orders)
                self._orphaned = time.monotonic()
                leave()

        loop.add_reader(self._settings.orders, read)

    @property
    def abandoned(self) -> bool:
        """Whether a server without a job should end: its guardian was killed, and no worker came since."""
        return time.monotonic() - self._orphaned > ORPHAN_SECONDS

    def end(self) -> None:
        """Ends the standby and deletes the state."""
        if self._standby is not None:
            self._standby.signal(signal.SIGKILL)  # it has nothing to clean up
            self._standby.wait()
        if self._file is not None:
            self._file.remove()


def report_to_guardian(settings: CoordinatorSettings, ended: ServerReport) -> bool:
    """Sends the guardian how the server ended; returns False if the guardian is gone."""
    try:
        os.write(settings.report, msgspec.json.encode(ended) + b"\n")
    except BrokenPipeError:
        return False
    return True
