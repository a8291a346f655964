"""Who sends, and who reads: whoever asks, whoever waits, and the lines' own thread."""

from __future__ import annotations

import gc
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hubring.ps.client import send_window
from hubring.ps.client.connections import Inflight, Lines
from hubring.ps.core.errors import ConnectionLost, DeadlineExceeded, HubringError
from hubring.ps.core.messages import Pull, Push, Values
from hubring.ps.core.traffic import Traffic
from hubring.ps.core.types import Sender
from hubring.ps.core.work import Work
from hubring.ps.transport import wire
from hubring.ps.transport.base import Message
from hubring.ps.transport.spin_wait import Lookout

SOON = 10.0


class Wire:
    """A connection without a shard: the test answers, and sees in which threads it was used."""

    def __init__(self) -> None:
        self.ear, self.mouth = socket.socketpair()
        self.ear.setblocking(False)
        self.sent: list[Message] = []
        self.let_out: list[int] = []
        """How much had been sent at each flush."""
        self.threads: dict[str, threading.Thread] = {}
        self.replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.before_receive: Callable[[], None] = lambda: None
        self.on_send: Callable[[], object] = lambda: None
        self.on_flush: Callable[[], object] = lambda: None
        self.in_hand: Callable[[], None] = lambda: None
        """Called where replies were read, and nobody was told of them yet."""

    @property
    def waitable(self) -> int:
        return self.ear.fileno()

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.replies.put(wire.encode_reply(Values(0, torch.ones(1), 0, 0, 0), number))
            self.mouth.send(b"!")

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
            came = len(self.ear.recv(4096))
        except BlockingIOError:
            return []
        self.in_hand()
        return [self.replies.get(timeout=SOON) for _ in range(came)]

    def close(self) -> None:
        self.ear.close()
        self.mouth.close()


class Told(Lookout):
    """Says that somebody has begun to wait."""

    began = threading.Event()

    def wait(self, timeout: float | None = None) -> dict[int, int]:
        self.began.set()
        return super().wait(timeout)


class Desk:
    """Lines over wires that the test answers."""

    def __init__(self, shards: int = 1) -> None:
        self.wires: list[Wire] = []
        self.attended = Told.began
        self.attended.clear()
        self.lines = Lines(shards, self._dial, Traffic())
        self.lines.connected.wait(SOON)

    @property
    def wire(self) -> Wire:
        return self.wires[-1]

    def _dial(self, shard: int) -> Wire:
        self.wires.append(Wire())
        return self.wire

    def ask(self, number: int, *, shard: int = 0, attended: bool = True) -> Work:
        work = Work(f"call {number}", 1, self.lines.attend if attended else None)
        message = wire.encode_request(Pull(Sender(0, 1), 0), number)
        self.lines.submit(Inflight(number, shard, message, None, lambda reply: None, work))
        return work

    def push(self, number: int, nbytes: int) -> Work:
        work = Work(f"push {number}", 1, self.lines.attend)
        message = wire.encode_request(Push(Sender(0, 1), number, 0, torch.ones(nbytes // 4), {}), number)
        self.lines.submit(Inflight(number, 0, message, None, lambda reply: None, work))
        return work


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr("hubring.ps.client.connections.Lookout", Told)
    desk = Desk()
    yield desk
    desk.lines.close()


def test_who_asks_sends_and_who_waits_reads(desk: Desk) -> None:
    work = desk.ask(1)
    assert len(desk.wire.sent) == 1
    timer = threading.Timer(0.1, desk.wire.answer, (1,))
    timer.start()
    work.wait(SOON)
    assert desk.wire.threads == dict.fromkeys(("send", "receive"), threading.current_thread())
    timer.join()


class Alarm(Exception):
    """What a signal raises."""


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """Gets the number of each SIGALRM, which also raises.

    A finalizer swallows what a signal raises in it, so none of earlier tests' runs meanwhile. And the timer
    is the one that bounds the test: a loop until an alarm has to look here for one that was swallowed.
    """
    came: list[int] = []

    def ring(number: int, frame: object) -> None:
        came.append(number)
        raise Alarm

    gc.disable()
    before, limit = signal.signal(signal.SIGALRM, ring), signal.getitimer(signal.ITIMER_REAL)
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *limit)
    gc.enable()


def cork_until_the_alarm(lines: Lines, microseconds: int, alarms: list[int]) -> None:
    alarms.clear()
    signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
    while not alarms:
        with lines.corked():
            pass


class InterruptedCorks(set[Any]):
    """A signal raises as soon as something is in here."""

    def add(self, element: object) -> None:
        super().add(element)
        raise Alarm


def test_a_signal_that_comes_when_a_cork_is_in_takes_it_out_before_anybody_hears_of_it(desk: Desk) -> None:
    desk.lines._corks = InterruptedCorks()
    try:
        with desk.lines.corked():
            raise AssertionError
    except Alarm:
        assert not desk.lines._corked, "what is asked for here leaves"


def test_signals_that_raise_at_any_moment_leave_nothing_taken(desk: Desk, alarms: list[int]) -> None:
    lines = desk.lines
    for turn in range(2000):
        with pytest.raises(Alarm):
            cork_until_the_alarm(lines, 20 + turn % 50, alarms)
        assert not lines._corked
        assert lines._hands.acquire(timeout=SOON)
        lines._hands.release()


def numbers_of(messages: list[Message]) -> list[int]:
    return [wire.decode_request(message)[0] for message in messages]


def test_what_would_run_ahead_leaves_with_the_answers(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_window, "PATIENCE_SECONDS", 60.0)
    follows = threading.Event()
    desk.wire.on_send = lambda: follows.set() if len(desk.wire.sent) == 4 else None
    works = [desk.push(number, send_window.BYTES // 2) for number in range(5)]
    assert numbers_of(desk.wire.sent) == [0, 1, 2]
    desk.wire.answer(0)
    works[0].wait(SOON)
    assert follows.wait(SOON)  # sent by whoever read the answer, which may have been the lines' own thread
    assert numbers_of(desk.wire.sent) == [0, 1, 2, 4]  # the higher key goes first


@pytest.mark.parametrize("attended", [True, False])
def test_what_is_held_back_leaves_in_time_though_no_answer_comes(desk: Desk, attended: bool) -> None:
    """The others may send in another order, and wait for what is held back."""
    count, all_out = 12, threading.Event()
    desk.wire.on_send = lambda: all_out.set() if len(desk.wire.sent) == count else None
    first = desk.push(0, send_window.BYTES)
    waiting = threading.Thread(target=first.wait, args=(SOON,))
    if attended:
        waiting.start()
        assert desk.attended.wait(SOON)
    work = [desk.push(number, send_window.BYTES) for number in range(1, count)][-1]
    assert all_out.wait(SOON)
    desk.wire.answer(*range(count))
    if attended:
        waiting.join()
    work.wait(SOON)


def test_where_nobody_waits_the_lines_read_for_themselves(desk: Desk) -> None:
    work, over = desk.ask(1), threading.Event()
    work.when_done(lambda _: over.set())
    desk.wire.answer(1)
    assert over.wait(SOON)
    assert desk.wire.threads["receive"] is not threading.current_thread()


def test_one_attends_and_reads_for_the_other(desk: Desk) -> None:
    first, second = desk.ask(1), desk.ask(2)
    attending = threading.Thread(target=first.wait, args=(SOON,))
    attending.start()
    assert desk.attended.wait(SOON)
    waiting = threading.Thread(target=second.wait, args=(SOON,))
    waiting.start()
    desk.wire.answer(2)
    waiting.join(SOON)
    assert (waiting.is_alive(), desk.wire.threads["receive"]) == (False, attending)
    desk.wire.answer(1)
    attending.join(SOON)
    assert not attending.is_alive()


def test_an_answer_read_elsewhere_while_somebody_begins_to_wait_ends_the_wait(desk: Desk) -> None:
    """The lines' own thread had the reply in hand when the wait began: no news comes after it."""
    reading = threading.Event()

    def hold() -> None:
        reading.set()
        assert desk.attended.wait(SOON)

    desk.wire.in_hand = hold
    work = desk.ask(1)
    desk.wire.answer(1)
    assert reading.wait(SOON)
    waiter = threading.Thread(target=work.wait)  # a deadline of its own would end the wait, late
    waiter.start()
    waiter.join(SOON)
    assert not waiter.is_alive()


def test_what_is_asked_while_another_waits_is_answered(desk: Desk) -> None:
    first = desk.ask(1)
    waiter = threading.Thread(target=first.wait, args=(SOON,))
    waiter.start()
    assert desk.attended.wait(SOON)
    second = desk.ask(2)
    desk.wire.answer(2)
    second.wait(SOON)
    assert (first.done, desk.wire.threads["receive"]) == (False, waiter)
    desk.wire.answer(1)
    waiter.join(SOON)
    assert first.done


def test_what_is_corked_leaves_together(desk: Desk) -> None:
    with desk.lines.corked():
        works = [desk.ask(number) for number in range(3)]
        assert desk.wire.sent == []
    assert desk.wire.let_out == [3]
    desk.wire.answer(0, 1, 2)
    for work in works:
        work.wait(SOON)


def test_an_inner_cork_lets_nothing_out_and_wakes_nobody(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(desk.lines._bell, "ring", lambda: rung.append("woken"))
        with desk.lines.corked():
            with desk.lines.corked():
                desk.ask(0)
            desk.ask(1)
            assert (desk.wire.sent, rung) == ([], [])
        assert (desk.wire.let_out, rung) == ([2], [])


def test_every_shard_s_requests_are_ready_before_the_first_shard_is_woken() -> None:
    desk, ready = Desk(shards=2), []
    first, second = desk.wires
    first.on_flush = lambda: ready.append(len(second.sent))
    with desk.lines.corked():
        for shard in (0, 1):
            desk.ask(shard, shard=shard)
    assert (ready, second.let_out) == ([1], [1])
    desk.lines.close()


def test_a_wait_ends_at_its_deadline_and_the_call_goes_on(desk: Desk) -> None:
    work = desk.ask(1)
    with pytest.raises(DeadlineExceeded, match=r"call 1 did not finish within 0.05 s"):
        work.wait(0.05)
    desk.wire.answer(1)
    work.wait(SOON)


@pytest.mark.parametrize("attended", [True, False])
def test_a_line_that_breaks_is_dialled_again_and_asked_again(desk: Desk, attended: bool) -> None:
    def snap() -> None:
        raise ConnectionLost("it snapped")

    desk.wire.before_receive = snap
    asked = desk.wire
    work = desk.ask(1, attended=attended)

    def answer_the_second() -> None:
        while desk.wire is asked or not desk.wire.sent:
            work.done  # noqa: B018 - gives way to the others
        desk.wire.answer(1)

    helper = threading.Thread(target=answer_the_second)
    helper.start()
    asked.mouth.send(b"!")
    work.wait(SOON)
    helper.join(SOON)
    assert [message.header for message in desk.wire.sent] == [message.header for message in asked.sent]


def test_what_breaks_off_a_wait_ends_the_lines(desk: Desk) -> None:
    """A signal's exception may have cost a reply: who asks again is told so, and does not wait for it."""

    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    desk.wire.before_receive = interrupt
    work = desk.ask(1)
    timer = threading.Timer(0.1, desk.wire.answer, (1,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait(SOON)
    with pytest.raises(HubringError, match="KeyboardInterrupt came while"):
        desk.ask(2).wait(SOON)
    timer.join()


@pytest.mark.parametrize("attended", [True, False])
def test_an_answer_that_makes_no_sense_fails_what_waits(desk: Desk, attended: bool) -> None:
    work = desk.ask(1, attended=attended)
    desk.wire.replies.put(Message(b"no header"))
    desk.wire.mouth.send(b"!")
    with pytest.raises(HubringError, match="no header"):
        work.wait(SOON)


def test_a_signal_s_exception_in_a_wait_is_its_own_and_costs_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = desk.ask(1)

    def alarm(self: Lookout, timeout: float | None = None) -> dict[int, int]:
        raise TimeoutError("the script's own alarm")

    with monkeypatch.context() as patch:
        patch.setattr(Told, "wait", alarm)
        with pytest.raises(TimeoutError, match="alarm"):
            work.wait(SOON)
    desk.wire.answer(1)
    work.wait(SOON)


def test_a_deadline_beyond_what_a_poll_may_take_is_kept(desk: Desk) -> None:
    work = desk.ask(1)
    timer = threading.Timer(0.1, desk.wire.answer, (1,))
    timer.start()
    work.wait(1e7)
    timer.join()


def test_a_callback_that_raises_keeps_no_other_call_waiting(desk: Desk) -> None:
    works = [desk.ask(number) for number in range(3)]

    def stumble(_: Work) -> None:
        raise RuntimeError("a callback")

    works[1].when_done(stumble)
    with pytest.raises(RuntimeError, match="a callback"):
        desk.lines.fail(ConnectionLost("gone"))
    assert all(work.done for work in works)


def test_closing_ends_who_waits(desk: Desk) -> None:
    work, ends = desk.ask(1), queue.SimpleQueue[str]()

    def wait() -> None:
        try:
            work.wait(SOON)
        except ConnectionLost as lost:
            ends.put(str(lost))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert desk.attended.wait(SOON)
    desk.lines.close()
    assert "closed" in ends.get(timeout=SOON)
    waiter.join(SOON)
