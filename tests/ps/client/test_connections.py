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
from tests.support.fakes.scripted_shards import SOON, ScriptedShards, opened

shards = pytest.fixture(opened, name="shards")


def test_who_asks_sends_and_who_waits_reads(shards: ScriptedShards) -> None:
    work = shards.ask(1)
    assert len(shards.wire.sent) == 1
    timer = threading.Timer(0.1, shards.wire.answer, (1,))
    timer.start()
    work.wait(SOON)
    assert shards.wire.threads == dict.fromkeys(("send", "receive"), threading.current_thread())
    timer.join()


def numbers_of(messages: list[Message]) -> list[int]:
    return [wire.decode_request(message)[0] for message in messages]


def test_what_would_run_ahead_leaves_with_the_answers(
    shards: ScriptedShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_window, "PATIENCE_SECONDS", 60.0)
    follows = threading.Event()
    shards.wire.on_send = lambda: follows.set() if len(shards.wire.sent) == 4 else None
    works = [shards.push(number, send_window.BYTES // 2) for number in range(5)]
    assert numbers_of(shards.wire.sent) == [0, 1, 2]
    shards.wire.answer(0)
    works[0].wait(SOON)
    assert follows.wait(
        SOON
    )  # sent by whoever read the answer, which may have been the connections' own thread
    assert numbers_of(shards.wire.sent) == [0, 1, 2, 4]  # the higher key goes first


@pytest.mark.parametrize("attended", [True, False])
def test_what_is_held_back_leaves_in_time_though_no_answer_comes(
    shards: ScriptedShards, attended: bool
) -> None:
    """The others may send in another order, and wait for what is held back."""
    count, all_out = 12, threading.Event()
    shards.wire.on_send = lambda: all_out.set() if len(shards.wire.sent) == count else None
    first = shards.push(0, send_window.BYTES)
    waiting = threading.Thread(target=first.wait, args=(SOON,))
    if attended:
        waiting.start()
        assert shards.attended.wait(SOON)
    work = [shards.push(number, send_window.BYTES) for number in range(1, count)][-1]
    assert all_out.wait(SOON)
    shards.wire.answer(*range(count))
    if attended:
        waiting.join()
    work.wait(SOON)


def test_where_nobody_waits_the_lines_read_for_themselves(shards: ScriptedShards) -> None:
    work, over = shards.ask(1), threading.Event()
    work.when_done(lambda _: over.set())
    shards.wire.answer(1)
    assert over.wait(SOON)
    assert shards.wire.threads["receive"] is not threading.current_thread()


def test_one_attends_and_reads_for_the_other(shards: ScriptedShards) -> None:
    first, second = shards.ask(1), shards.ask(2)
    attending = threading.Thread(target=first.wait, args=(SOON,))
    attending.start()
    assert shards.attended.wait(SOON)
    waiting = threading.Thread(target=second.wait, args=(SOON,))
    waiting.start()
    shards.wire.answer(2)
    waiting.join(SOON)
    assert (waiting.is_alive(), shards.wire.threads["receive"]) == (False, attending)
    shards.wire.answer(1)
    attending.join(SOON)
    assert not attending.is_alive()


def test_an_answer_read_elsewhere_while_somebody_begins_to_wait_ends_the_wait(shards: ScriptedShards) -> None:
    """The connections' own thread had the reply in hand when the wait began: no news comes after it."""
    reading = threading.Event()

    def hold() -> None:
        reading.set()
        assert shards.attended.wait(SOON)

    shards.wire.in_hand = hold
    work = shards.ask(1)
    shards.wire.answer(1)
    assert reading.wait(SOON)
    waiter = threading.Thread(target=work.wait)  # a deadline of its own would end the wait, late
    waiter.start()
    waiter.join(SOON)
    assert not waiter.is_alive()


def test_what_is_asked_while_another_waits_is_answered(shards: ScriptedShards) -> None:
    first = shards.ask(1)
    waiter = threading.Thread(target=first.wait, args=(SOON,))
    waiter.start()
    assert shards.attended.wait(SOON)
    second = shards.ask(2)
    shards.wire.answer(2)
    second.wait(SOON)
    assert (first.done, shards.wire.threads["receive"]) == (False, waiter)
    shards.wire.answer(1)
    waiter.join(SOON)
    assert first.done


def test_what_is_batched_leaves_together(shards: ScriptedShards) -> None:
    with shards.connections.batched():
        works = [shards.ask(number) for number in range(3)]
        assert shards.wire.sent == []
    assert shards.wire.let_out == [3]
    shards.wire.answer(0, 1, 2)
    for work in works:
        work.wait(SOON)


def test_an_inner_batch_lets_nothing_out_and_wakes_nobody(
    shards: ScriptedShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(shards.connections._bell, "ring", lambda: rung.append("woken"))
        with shards.connections.batched():
            with shards.connections.batched():
                shards.ask(0)
            shards.ask(1)
            assert (shards.wire.sent, rung) == ([], [])
        assert (shards.wire.let_out, rung) == ([2], [])


def test_every_shard_s_requests_are_ready_before_the_first_shard_is_woken() -> None:
    shards, ready = ScriptedShards(count=2), []
    first, second = shards.wires
    first.on_flush = lambda: ready.append(len(second.sent))
    with shards.connections.batched():
        for shard in (0, 1):
            shards.ask(shard, shard=shard)
    assert (ready, second.let_out) == ([1], [1])
    shards.connections.close()


def test_a_wait_ends_at_its_deadline_and_the_call_goes_on(shards: ScriptedShards) -> None:
    work = shards.ask(1)
    with pytest.raises(DeadlineExceeded, match=r"call 1 did not finish within 0.05 s"):
        work.wait(0.05)
    shards.wire.answer(1)
    work.wait(SOON)


@pytest.mark.parametrize("attended", [True, False])
def test_a_line_that_breaks_is_dialled_again_and_asked_again(shards: ScriptedShards, attended: bool) -> None:
    def snap() -> None:
        raise ConnectionLost("it snapped")

    shards.wire.before_receive = snap
    asked = shards.wire
    work = shards.ask(1, attended=attended)

    def answer_the_second() -> None:
        while shards.wire is asked or not shards.wire.sent:
            work.done  # noqa: B018 - gives way to the others
        shards.wire.answer(1)

    helper = threading.Thread(target=answer_the_second)
    helper.start()
    asked.far_end.send(b"!")
    work.wait(SOON)
    helper.join(SOON)
    assert [message.header for message in shards.wire.sent] == [message.header for message in asked.sent]


@pytest.mark.parametrize("attended", [True, False])
def test_an_answer_that_makes_no_sense_fails_what_waits(shards: ScriptedShards, attended: bool) -> None:
    work = shards.ask(1, attended=attended)
    shards.wire.replies.put(Message(b"no header"))
    shards.wire.far_end.send(b"!")
    with pytest.raises(HubringError, match="invalid header"):
        work.wait(SOON)


def test_a_deadline_beyond_what_a_poll_may_take_is_kept(shards: ScriptedShards) -> None:
    work = shards.ask(1)
    timer = threading.Timer(0.1, shards.wire.answer, (1,))
    timer.start()
    work.wait(1e7)
    timer.join()


def test_a_callback_that_raises_keeps_no_other_call_waiting(shards: ScriptedShards) -> None:
    works = [shards.ask(number) for number in range(3)]

    def stumble(_: Work) -> None:
        raise RuntimeError("a callback")

    works[1].when_done(stumble)
    with pytest.raises(RuntimeError, match="a callback"):
        shards.connections.fail(ConnectionLost("gone"))
    assert all(work.done for work in works)


def test_closing_ends_who_waits(shards: ScriptedShards) -> None:
    work, ends = shards.ask(1), queue.SimpleQueue[str]()

    def wait() -> None:
        try:
            work.wait(SOON)
        except ConnectionLost as lost:
            ends.put(str(lost))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert shards.attended.wait(SOON)
    shards.connections.close()
    assert "closed" in ends.get(timeout=SOON)
    waiter.join(SOON)
