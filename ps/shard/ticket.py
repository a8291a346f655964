"""The return path of a reply."""

from __future__ import annotations

from dataclasses import dataclass

from hubring.ps.core.types import Sender
from hubring.ps.transport.base import Listener, ReturnPath


@dataclass(frozen=True, slots=True)
class Ticket:
    """The return path of one reply.

    Attributes:
        listener: The listener that received the request.
        reply_to: The listener's return path to the sender.
        request: The sender's number of the request.
        sender: The sender.
        since: When the loop began to handle the request, by `time.monotonic_ns`.
    """

    listener: Listener
    reply_to: ReturnPath
    request: int
    sender: Sender
    since: int

    def __hash__(self) -> int:
        return id(self)
