"""Writes a coordinator's state whenever it changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from msgspec.structs import replace

from hubring.protos.control_pb2 import DESCRIPTOR
from hubring.ps.recovery.records import State
from hubring.ps.recovery.state_file import StateFile, encode

log = logging.getLogger(__name__)

_CONTROL = f"/{DESCRIPTOR.services_by_name['Control'].full_name}/"

_ROUTINE: Mapping[str, frozenset[str]] = {
    "Heartbeat": frozenset({"rank", "incarnation", "step", "loss", "waiting", "telemetry"}),
    "ShardHeartbeat": frozenset({"token", "stream"}),
    "Rendezvous": frozenset({"rank", "incarnation", "key", "wait_seconds"}),
    "Clock": frozenset(),
    "Status": frozenset(),
}
"""The fields of requests that change nothing worth writing, by RPC. Most calls are such."""


class Commits:
    """Writes the state of one server.

    A state of thousands of workers takes some 10 ms. So calls that are answered at the same time share a
    commit, and commits take at most a tenth of the time, or a hundredth while there are no calls.

    Args:
        file: Where to.
        capture: Returns the current state.
    """

    def __init__(self, file: StateFile, capture: Callable[[], State]) -> None:
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
        self._began = time.monotonic()
        self._write()
        self._took = time.monotonic() - self._began

    async def _commit_soon(self) -> None:
        await asyncio.sleep(9 * self._took)
        self._next = None
        self.commit()

    def _write(self) -> None:
        state = self._capture()
        compared = encode(replace(state, steps={}))
        if compared == self._written:
            return
        try:
            self._file.write(encode(state))
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
