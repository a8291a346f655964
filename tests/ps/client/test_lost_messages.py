"""A message that is lost inside a living connection is sent again, and counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hubring.protos import data_pb2 as pb
from hubring.ps.client import requests as client_requests
from hubring.ps.client.requests import Inflight, Requests
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.core.work import Work
from hubring.ps.store.consistency import ASP, BSP
from hubring.ps.transport.base import Connection, Message
from tests.support.transports.one_shard import NUMEL, SOON, OneShard, Passing, begin, push, started

Lose = Callable[[pb.Header], bool]


class Lossy(Passing):
    """A connection that loses requests and replies, and notes the requests that pass."""

    def __init__(self, inner: Connection, lose: Lose) -> None:
        super().__init__(inner)
        self.lose = lose
        self.bodies: list[str | None] = []
        self.probed = threading.Event()
        """Set when three probes were answered."""
        self._answers = 0

    def send(self, message: Message, into: memoryview | None = None) -> None:
        header = pb.Header.FromString(message.header)
        self.bodies.append(header.WhichOneof("body"))
        if not self.lose(header):
            super().send(message, into)

    def receive(self) -> list[Message]:
        passed = []
        for message in super().receive():
            header = pb.Header.FromString(message.header)
            self._answers += header.HasField("missing")
            if self._answers == 3:
                self.probed.set()
            if not self.lose(header):
                passed.append(message)
        return passed


class First:
    """Loses the first messages with this body."""

    def __init__(self, body: str, count: int) -> None:
        self.body, self.left = body, count

    def __call__(self, header: pb.Header) -> bool:
        lost = header.WhichOneof("body") == self.body and self.left > 0
        self.left -= lost
        return lost


@pytest.fixture(autouse=True)
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_requests, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(client_requests, "ANSWER_SECONDS", 0.02)


start = pytest.fixture(started, name="start")
Start = Callable[..., OneShard]


@pytest.mark.parametrize("body", ["init", "pull", "push", "values", "result", "probe", "missing"])
@pytest.mark.parametrize("attended", [True, False])
def test_a_lost_message_is_resent_and_counts_once(start: Start, body: str, attended: bool) -> None:
    shard = start(ASP(), 1)
    about_loss = body in ("probe", "missing")  # one that is lost looks like a stuck connection
    lose, losing_pushes = First(body, 2 - about_loss), First("push", about_loss)
    client = shard.client(0, lambda line: Lossy(line, lambda header: lose(header) or losing_pushes(header)))
    values = begin(client)
    for _ in range(4):
        push(client, torch.ones(NUMEL), values, attended=attended).wait(SOON)
    assert lose.left == 0
    assert values.tolist() == [4.0] * NUMEL
    assert shard.loop.store.stats().pushes == 4


def test_a_push_that_waits_for_others_is_sent_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_requests, "ANSWER_SECONDS", SOON)  # a busy shard's connection is not stuck
    shard = start(BSP(), 2)
    seen: list[Lossy] = []

    def watched(connection: Connection) -> Lossy:
        seen.append(Lossy(connection, lambda header: False))
        return seen[-1]

    first, second = shard.client(0, watched), shard.client(1)
    values, other = begin(first), begin(second)
    early = push(first, torch.ones(NUMEL), values)
    waiting = threading.Thread(target=early.wait, args=(SOON,))
    waiting.start()
    assert seen[0].probed.wait(SOON)
    push(second, torch.ones(NUMEL), other).wait(SOON)
    waiting.join()
    assert seen[0].bodies.count("push") == 1
    assert values.tolist() == other.tolist() == [1.0] * NUMEL


def test_a_connection_on_which_nothing_comes_is_replaced(start: Start) -> None:
    shard = start(ASP(), 1)
    seen: list[Lossy] = []

    def first_is_stuck(connection: Connection) -> Lossy:
        mute = not seen
        seen.append(Lossy(connection, lambda header: mute and seen[0].bodies.count("push") > 1))
        return seen[-1]

    client = shard.client(0, first_is_stuck)
    values = begin(client)
    for _ in range(3):
        push(client, torch.ones(NUMEL), values).wait(SOON)
    assert values.tolist() == [3.0] * NUMEL  # which the first connection alone could not bring
    assert shard.loop.store.stats().pushes == 3


def test_a_shard_that_accepts_no_other_connection_keeps_the_stuck_one(start: Start) -> None:
    shard = start(ASP(), 1)
    refused = threading.Event()
    seen: list[Lossy] = []

    def only_one(connection: Connection) -> Lossy:
        if seen:
            connection.close()
            refused.set()
            raise ServerUnreachable("the shard is stopped")
        seen.append(
            Lossy(connection, lambda header: seen[0].bodies.count("push") == 2 and not refused.is_set())
        )
        return seen[0]

    client = shard.client(0, only_one)
    values = begin(client)
    for _ in range(2):
        push(client, torch.ones(NUMEL), values).wait(SOON)
    assert refused.is_set()
    assert values.tolist() == [2.0] * NUMEL


def late_requests(*sent: float, nbytes: int = 0) -> Requests:
    """Returns requests 0, 1, ... of one shard that were sent at these times and send so many bytes."""
    requests = Requests(1, bounded=False)
    for number, time in enumerate(sent):
        message = Message(b"", memoryview(bytes(nbytes)))
        requests.put(Inflight(number, 0, message, None, lambda reply: None, Work("a push"), nbytes, time))
        assert requests.next(0) is not None
    return requests


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time of a request's client."""
    time = [0.0]
    monkeypatch.setattr("hubring.ps.client.requests.monotonic", lambda: time[0])
    return lambda seconds: time.__setitem__(0, seconds)


def test_a_request_that_is_late_just_after_the_silence_is_asked_for_then(
    now: Callable[[float], None],
) -> None:
    requests = late_requests(0.0, nbytes=client_requests.SLOWEST_BYTES_PER_SECOND)
    now(client_requests.SILENT_SECONDS)
    assert requests.late(0) == ([], False)
    now(client_requests.SILENT_SECONDS + 1.0)
    assert requests.late(0) == ([0], False)


def test_requests_that_are_late_soon_are_asked_for_with_the_first(now: Callable[[float], None]) -> None:
    answer = client_requests.ANSWER_SECONDS
    requests = late_requests(0.0, answer / 2, 2 * answer)
    now(client_requests.SILENT_SECONDS)
    assert requests.late(0) == ([0, 1], False)
    now(client_requests.SILENT_SECONDS + answer)
    assert requests.late(0) == ([0, 1, 2], True)
