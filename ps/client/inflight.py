"""A request on its way, and what is needed to send it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hubring.ps.client import shard_silence
from hubring.ps.core.messages import Reply
from hubring.ps.core.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hubring.ps.transport.base import Message


@dataclass(slots=True)
class Inflight:
    """A request and what is needed to send it again and to settle its reply.

    Attributes:
        number: Identifies the request and its reply.
        shard: The shard that receives it.
        message: The encoded request.
        into: Where the reply's payload should land.
        settle: Applies the reply. An exception fails `work`.
        work: The work that this request is one part of.
        sent_at: When it was sent last, by `time.monotonic`.
        damaged: How often it or its reply did not match its checksum.
    """

    number: int
    shard: int
    message: Message
    into: Tensor | None
    settle: Callable[[Reply], None]
    work: Work
    sent_at: float = 0.0
    damaged: int = 0

    @property
    def nbytes(self) -> int:
        """Payload bytes that the request sends."""
        return 0 if self.message.payload is None else self.message.payload.nbytes

    @property
    def total_bytes(self) -> int:
        """Payload bytes that the request sends and expects."""
        return self.nbytes + (0 if self.into is None else self.into.nbytes)

    @property
    def late_at(self) -> float:
        """When it should be answered, unless it waits for other workers."""
        return self.sent_at + shard_silence.SECONDS + shard_silence.seconds_of(self.total_bytes)
