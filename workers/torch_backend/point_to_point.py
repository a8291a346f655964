"""Messages from one member to another, through the hub.

The messages of a sender to a receiver with one tag are numbered, and both ends count alike. A sender also
announces each message in the group's store, in the order of all senders to that receiver, so that a receiver
without a source learns whose turn it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hubring.ps.core.errors import DeadlineExceeded, HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.base import Communicator, transfer_call

LOOK_SECONDS = 0.001

OnEnd = Callable[[BaseException | None, int], None]
"""Receives the error, if any, and the member that sent."""


class Mailbox:
    """One member's messages. Safe from any thread.

    Args:
        communicator: Connects this process to the job.
        store: The group's store.
        name: The group's name, the same for all members.
        ranks: The members' ranks in the job.
        own: This member's rank in the group.
    """

    def __init__(
        self, communicator: Communicator, store: Store, name: str, ranks: Sequence[int], own: int
    ) -> None:
        self._communicator = communicator
        self._store = store
        self._name = name
        self._ranks = ranks
        self._own = own
        self._lock = threading.Lock()
        self._sent: Counter[tuple[int, int]] = Counter()
        """Messages by receiver and tag."""
        self._received: Counter[tuple[int, int]] = Counter()
        """Messages by sender and tag that some receive has taken."""
        self._announced: Counter[tuple[int, int]] = Counter()
        """Messages by sender and tag whose announcements were read."""
        self._read: Counter[int] = Counter()
        """Announcements that were read, by tag."""
        self._closed = ""

    def send(self, data: Tensor, receiver: int, tag: int, on_end: OnEnd) -> None:
        """Sends bytes in host memory. They are the mailbox's until `on_end` is called."""
        with self._lock:
            number = self._sent[receiver, tag]
            self._sent[receiver, tag] += 1
        self._transfer(self._own, receiver, tag, number, data, on_end)
        place = f"{receiver} {tag}"
        self._store.set(f"{place} {self._store.add(place, 1)}", str(self._own))

    def receive(self, into: Tensor, sender: int, tag: int, on_end: OnEnd) -> None:
        """Receives a member's next message with this tag."""
        with self._lock:
            number = self._received[sender, tag]
            self._received[sender, tag] += 1
        self._transfer(sender, self._own, tag, number, into, on_end)

    def receive_any(self, into: Tensor, tag: int, timeout: float, on_end: OnEnd) -> None:
        """Receives the next message with this tag that no other receive takes."""

        def receive() -> None:
            try:
                sender = self._next_sender(tag, time.monotonic() + timeout)
            except (HubringError, RuntimeError) as error:
                on_end(error, -1)
            else:
                self.receive(into, sender, tag, on_end)

        threading.Thread(target=receive, name="receive from any", daemon=True).start()

    def close(self, reason: str) -> None:
        """Ends waiting receivers without a source."""
        self._closed = reason

    def _next_sender(self, tag: int, deadline: float) -> int:
        while True:
            with self._lock:
                key = f"{self._own} {tag} {self._read[tag] + 1}"
                if self._store.check([key]):
                    sender = int(self._store.get(key))
                    self._read[tag] += 1
                    self._announced[sender, tag] += 1
                    if self._announced[sender, tag] > self._received[sender, tag]:
                        return sender
                    continue
            if self._closed:
                raise RingBroken(self._closed)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no member sent a message with tag {tag} in time")
            time.sleep(LOOK_SECONDS)

    def _transfer(
        self, sender: int, receiver: int, tag: int, number: int, data: Tensor, on_end: OnEnd
    ) -> None:
        sends = sender == self._own

        def land(came: Sequence[Tensor]) -> None:
            if sends:
                return
            if came[0].numel() != data.numel():
                raise ValueError(
                    f"rank {sender} sent {came[0].numel()} bytes to a tensor of {data.numel()} bytes"
                )
            data.copy_(came[0])

        def ended(work: Work) -> None:
            on_end(work.error, sender)

        call = transfer_call(f"{self._name} {tag}.{number}", self._ranks[sender], self._ranks[receiver])
        self._communicator.collective(call, *([data] if sends else []), then=land).when_done(ended)
