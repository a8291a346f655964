"""Who sends, and who reads: whoever asks, whoever waits, and the connections' own thread."""

from __future__ import annotations

import queue
import threading

import pytest

from hubring.ps.client import send_window
from hubring.ps.core.errors import ConnectionLost, DeadlineExceeded, HubringError
from hubring.ps.core.work import Work
from hubring.ps.transport import wire
from hubring.ps.transport.base import Message
from tests.support.fakes.desk import SOON, Desk, opened

desk = pytest.fixture(opened, name="desk")


def test_who_asks_sends_and_who_waits_reads(desk: Desk) -> None:
    work = desk.ask(1)
    assert len(desk.wire.sent) == 1
    timer = threading.Timer(0.1, desk.wire.answer, (1,))
    timer.start()
    work.wait(SOON)
    assert desk.wire.threads == dict.fromkeys(("send", "receive"), threading.current_thread())
    timer.join()


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
    assert follows.wait(
        SOON
    )  # sent by whoever read the answer, which may have been the connections' own thread
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
    """The connections' own thread had the reply in hand when the wait began: no news comes after it."""
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


def test_what_is_batched_leaves_together(desk: Desk) -> None:
    with desk.connections.batched():
        works = [desk.ask(number) for number in range(3)]
        assert desk.wire.sent == []
    assert desk.wire.let_out == [3]
    desk.wire.answer(0, 1, 2)
    for work in works:
        work.wait(SOON)


def test_an_inner_batch_lets_nothing_out_and_wakes_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(desk.connections._bell, "ring", lambda: rung.append("woken"))
        with desk.connections.batched():
            with desk.connections.batched():
                desk.ask(0)
            desk.ask(1)
            assert (desk.wire.sent, rung) == ([], [])
        assert (desk.wire.let_out, rung) == ([2], [])


def test_every_shard_s_requests_are_ready_before_the_first_shard_is_woken() -> None:
    desk, ready = Desk(shards=2), []
    first, second = desk.wires
    first.on_flush = lambda: ready.append(len(second.sent))
    with desk.connections.batched():
        for shard in (0, 1):
            desk.ask(shard, shard=shard)
    assert (ready, second.let_out) == ([1], [1])
    desk.connections.close()


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


@pytest.mark.parametrize("attended", [True, False])
def test_an_answer_that_makes_no_sense_fails_what_waits(desk: Desk, attended: bool) -> None:
    work = desk.ask(1, attended=attended)
    desk.wire.replies.put(Message(b"no header"))
    desk.wire.mouth.send(b"!")
    with pytest.raises(HubringError, match="no header"):
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
        desk.connections.fail(ConnectionLost("gone"))
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
    desk.connections.close()
    assert "closed" in ends.get(timeout=SOON)
    waiter.join(SOON)
