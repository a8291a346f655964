"""Connections to shards whose answers a test controls."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from hubring.ps.client.connections import ShardConnections
from hubring.ps.client.requests import Inflight
from hubring.ps.core.counters import Traffic
from hubring.ps.core.messages import Pull, Push, Values
from hubring.ps.core.types import Sender
from hubring.ps.core.work import Work
from hubring.ps.transport.base import Message
from hubring.ps.transport.encode import encode_reply, encode_request
from hubring.ps.transport.polling import SpinWait

SOON = 10.0


class Wire:
    """A connection without a shard: the test answers, and sees the threads that used it."""

    def __init__(self) -> None:
        self.near_end, self.far_end = socket.socketpair()
        self.near_end.setblocking(False)
        self.waitable = self.near_end.fileno()
        self.sent: list[Message] = []
        self.let_out: list[int] = []
        """Number of messages sent before each flush."""
        self.threads: dict[str, threading.Thread] = {}
        self.replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.before_receive: Callable[[], None] = lambda: None
        self.on_send: Callable[[], object] = lambda: None
        self.on_flush: Callable[[], object] = lambda: None
        self.in_hand: Callable[[], None] = lambda: None
        """Called after replies are read, before any waiting call gets them."""

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.replies.put(encode_reply(Values(0, torch.ones(1), 0, 0, 0), number))
            self.far_end.send(b"!")

    def send(self, message: Message, into: memoryview | None = None) -> None:
        self.threads["send"] = threading.current_thread()
        self.sent.append(message)
        self.on_send()

    def flush(self) -> None:
        self.let_out.append(len(self.sent))
        self.on_flush()

    def receive(self) -> list[Message]:
        self.threads["receive"] = threading.current_thread()
        self.before_receive()
        try:
            came = len(self.near_end.recv(4096))
        except BlockingIOError:
            return []
        self.in_hand()
        return [self.replies.get(timeout=SOON) for _ in range(came)]

    def close(self) -> None:
        self.near_end.close()
        self.far_end.close()


class AnnouncedWait(SpinWait):
    """Signals that a thread has started to wait."""

    began = threading.Event()

    def wait(self, timeout: float | None = None) -> dict[int, int]:
        self.began.set()
        return super().wait(timeout)


class ScriptedShards:
    """Any number of shards, over connections that the test answers."""

    def __init__(self, count: int = 1) -> None:
        self.wires: list[Wire] = []
        self.attended = AnnouncedWait.began
        self.attended.clear()
        self.connections = ShardConnections(Sender(0, 1), count, self._dial, Traffic())
        self.connections.connected.wait(SOON)

    @property
    def wire(self) -> Wire:
        return self.wires[-1]

    def _dial(self, shard: int) -> Wire:
        self.wires.append(Wire())
        return self.wire

    def ask(self, number: int, *, shard: int = 0, attended: bool = True) -> Work:
        work = Work(f"call {number}", 1, self.connections.attend if attended else None)
        message = encode_request(Pull(Sender(0, 1), 0), number)
        self.connections.submit(Inflight(number, shard, message, None, lambda reply: None, work))
        return work

    def push(self, number: int, nbytes: int) -> Work:
        work = Work(f"push {number}", 1, self.connections.attend)
        message = encode_request(Push(Sender(0, 1), number, 0, torch.ones(nbytes // 4), {}), number)
        self.connections.submit(Inflight(number, 0, message, None, lambda reply: None, work))
        return work


def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedShards]:
    monkeypatch.setattr("hubring.ps.client.connections.SpinWait", AnnouncedWait)
    shards = ScriptedShards()
    yield shards
    shards.connections.close()
