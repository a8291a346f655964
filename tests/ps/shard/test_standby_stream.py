"""A primary's stream, on a connection that the test answers."""

from __future__ import annotations

import os

import pytest
import torch

from hubring.ps.core.errors import ConnectionLost
from hubring.ps.core.messages import (
    ClosedRound,
    CollectiveResult,
    CoordinatorCall,
    Forwarded,
    Reply,
    StoreCommand,
)
from hubring.ps.shard.standby_stream import (
    SILENT_SECONDS,
    STALLED_SECONDS,
    CallHistory,
    StandbyLost,
    Stream,
)
from hubring.ps.transport.base import Message
from hubring.ps.transport.decode import decode_request
from hubring.ps.transport.encode import encode_reply
from tests.support.fakes.clock import FakeTime

SECRET = b"secret"


class Answered:
    """A connection to a standby that the test plays."""

    def __init__(self) -> None:
        self.waitable = os.eventfd(0)
        self.sent: list[int] = []
        self.broken = False
        self._replies: list[Message] = []

    def send(self, message: Message, into: memoryview | None = None) -> None:
        self._check()
        number, forwarded = decode_request(message)
        assert isinstance(forwarded, Forwarded)
        assert forwarded.stream == SECRET
        self.sent.append(number)

    def flush(self) -> None:
        self._check()

    def receive(self) -> list[Message]:
        self._check()
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        os.close(self.waitable)

    def answer(self, number: int, reply: Reply | None = None) -> None:
        self._replies.append(encode_reply(reply or CollectiveResult(), number))

    def _check(self) -> None:
        if self.broken:
            raise ConnectionLost("the network is down")


class Story:
    def __init__(self) -> None:
        self.time = FakeTime()
        self.lost: list[ConnectionLost] = []
        self.replaced: list[str] = []
        self.allocated = 0
        self.released: list[str] = []
        self.stream = Stream(SECRET, self.allocate, self.lost.append, self.replaced.append, self.time.now)
        self.connection = Answered()
        self.stream.attach(self.connection)

    def allocate(self, nbytes: int) -> memoryview:
        self.allocated += 1
        return memoryview(bytearray(nbytes))

    def hold(self, name: str) -> None:
        self.stream.hold(lambda: self.released.append(name))

    def round(self, version: int) -> None:
        """Closes a round of two gradients."""
        total = self.stream.allocate(torch.zeros(4))
        self.stream.append(ClosedRound(0, version, torch.add(*torch.ones(2, 4), out=total)[:4], 2, {}, ()))

    def acknowledge(self, number: int) -> None:
        self.connection.answer(number)
        self.stream.receive()


@pytest.fixture
def story() -> Story:
    return Story()


def drain() -> CoordinatorCall:
    return CoordinatorCall(StoreCommand.DRAIN)


def test_a_reply_without_a_change_of_its_own_waits_for_a_fresh_acknowledgement(story: Story) -> None:
    story.stream.append(drain())  # may have been acknowledged before this shard was suspended
    story.stream.begin()
    story.hold("pull")
    assert story.connection.sent == [0, 1]
    story.acknowledge(0)
    assert story.released == []
    story.acknowledge(1)
    assert story.released == ["pull"]


def test_a_later_standby_hears_nothing_of_a_job_before_a_reset() -> None:
    history = CallHistory()
    for command in (StoreCommand.SET_VIEW, StoreCommand.DRAIN, StoreCommand.FAIL, StoreCommand.RESET):
        history.note(CoordinatorCall(command))
    assert history.calls() == []


def test_a_new_connection_gets_what_is_unacknowledged_in_order(story: Story) -> None:
    for _ in range(3):
        story.stream.append(drain())
    story.hold("reply")
    story.acknowledge(0)
    story.connection.broken = True
    story.stream.receive()
    assert [str(lost) for lost in story.lost] == ["the network is down"]
    story.stream.append(drain())
    again = story.connection = Answered()
    story.stream.attach(again)
    assert again.sent == [1, 2, 3]
    story.acknowledge(3)
    assert story.released == ["reply"]


def test_a_silent_standby_counts_as_lost(story: Story) -> None:
    assert [story.stream.patience] == [None]
    story.stream.append(drain())
    story.time.advance(SILENT_SECONDS - 1)
    assert story.stream.patience == 1.0
    story.stream.check()
    assert not story.lost
    story.time.advance(1.0)
    story.stream.check()
    assert isinstance(story.lost[0], StandbyLost)


def test_a_stream_is_stalled_while_a_change_is_unacknowledged(story: Story) -> None:
    story.stream.append(drain())
    story.time.advance(STALLED_SECONDS)
    found = [story.stream.stalled]
    story.time.advance(0.1)
    found.append(story.stream.stalled)
    story.acknowledge(0)
    assert [*found, story.stream.stalled] == [False, True, False]


def test_a_standby_that_answered_while_its_shard_was_busy_is_not_silent(story: Story) -> None:
    story.stream.append(drain())
    story.stream.append(drain())
    story.time.advance(SILENT_SECONDS)
    story.connection.answer(0)
    story.stream.check()
    assert not story.lost
    assert story.stream.patience == SILENT_SECONDS


def test_memory_of_a_round_is_used_again_once_the_round_is_acknowledged(story: Story) -> None:
    story.round(0)
    story.round(1)
    assert story.allocated == 2
    story.acknowledge(1)
    for version in range(2, 6):
        story.round(version)
        story.acknowledge(version)
    assert story.allocated == 2
