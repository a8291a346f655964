"""A coordinator that answers heartbeats as a test says."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from hubring.protos import control_pb2 as pb

Answer = pb.HeartbeatReply | pb.ShardHeartbeatReply | Exception | None
"""None: the reply lost its message."""


class Heartbeats:
    """A stub that gives these answers, and then none; also its channel, and an open call.

    Attributes:
        calls: The heartbeats so far.
        unanswered: Set once a heartbeat gets no answer.
    """

    def __init__(self, answers: Sequence[Answer] = ()) -> None:
        self._answers = iter(answers)
        self.calls = 0
        self.unanswered = threading.Event()
        self.Heartbeat = self.ShardHeartbeat = self

    def future(self, request: Any, timeout: float) -> Future[Answer]:
        self.calls += 1
        call: Future[Answer] = Future()
        for answer in self._answers:
            if isinstance(answer, Exception):
                call.set_exception(answer)
            else:
                call.set_result(answer)
            return call
        self.unanswered.set()
        return call

    def Leave(self, request: pb.LeaveRequest, timeout: float) -> pb.LeaveReply:  # noqa: N802
        return pb.LeaveReply()

    def Connect(self, request: pb.ConnectRequest) -> Heartbeats:  # noqa: N802
        return self

    def is_active(self) -> bool:
        return True

    def keep(self) -> None:
        """Does nothing."""

    cancel = close = keep
