"""Who sends, and who reads: whoever asks, whoever waits, and the connections' own thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from hubring.ps.client import connections, requests
from hubring.ps.core.errors import ConnectionLost, HubringError
from hubring.ps.core.work import Work
from hubring.ps.transport.base import Message
from hubring.ps.transport.decode import decode_request
from tests.support.fakes.scripted_shards import SOON, ScriptedShards, opened
from tests.support.processes.stopwatch import until

shards = pytest.fixture(opened, name="shards")


def test_the_calling_thread_sends_and_the_waiting_thread_receives(shards: ScriptedShards) -> None:
    shards.connections.wait_soon()
    work = shards.ask(1)
    assert len(shards.wire.sent) == 1
    shards.wire.answer(1)
    work.wait(SOON)
    assert shards.wire.threads == dict.fromkeys(("send", "receive"), threading.current_thread())


def test_answers_left_to_a_thread_that_does_not_wait_are_read(
    shards: ScriptedShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connections, requests):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    work = shards.ask(1)
    waiting = threading.Thread(target=work.wait, args=(SOON,))
    waiting.start()
    assert shards.attended.wait(SOON)
    shards.connections._reconnect_bell.ring()  # wakes the background thread, which sleeps again
    until(lambda: not shards.connections._background_poller.poll(0))
    shards.wire.answer(1)
    waiting.join()
    shards.connections.wait_soon()
    left = shards.ask(2)
    shards.wire.answer(2)
    until(lambda: left.done)


def numbers_of(messages: list[Message]) -> list[int]:
    return [decode_request(message)[0] for message in messages]


def test_pushes_beyond_the_send_window_are_sent_as_replies_arrive(
    shards: ScriptedShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PATIENCE_SECONDS", 60.0)
    follows = threading.Event()
    shards.wire.on_send = lambda: follows.set() if len(shards.wire.sent) == 4 else None
    works = [shards.push(number, requests.BYTES // 2) for number in range(5)]
    assert numbers_of(shards.wire.sent) == [0, 1, 2]
    shards.wire.answer(0)
    works[0].wait(SOON)
    assert follows.wait(SOON)  # sent by the thread that read the answer, perhaps the connections' own
    assert numbers_of(shards.wire.sent) == [0, 1, 2, 4]  # the higher key goes first


@pytest.mark.parametrize("attended", [True, False])
def test_pushes_beyond_the_window_are_sent_without_replies(shards: ScriptedShards, attended: bool) -> None:
    """The others may send in another order, and wait for what is held back."""
    count, all_out = 12, threading.Event()
    shards.wire.on_send = lambda: all_out.set() if len(shards.wire.sent) == count else None
    first = shards.push(0, requests.BYTES)
    waiting = threading.Thread(target=first.wait, args=(SOON,))
    if attended:
        waiting.start()
        assert shards.attended.wait(SOON)
    work = [shards.push(number, requests.BYTES) for number in range(1, count)][-1]
    assert all_out.wait(SOON)
    shards.wire.answer(*range(count))
    if attended:
        waiting.join()
    work.wait(SOON)


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


def test_a_request_sent_while_another_thread_waits_is_answered(shards: ScriptedShards) -> None:
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


def in_another_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(SOON)


def test_nothing_leaves_after_its_work_has_failed(shards: ScriptedShards) -> None:
    """The script owns its tensors again, and may have changed them."""
    error = HubringError("the job has failed")
    shards.wire.on_send = lambda: in_another_thread(lambda: shards.connections.fail(error))
    with shards.connections.batched():
        works = [shards.ask(number) for number in range(3)]
    assert len(shards.wire.sent) == 1
    assert all(work.done for work in works)


def test_an_urgent_push_overtakes_those_of_a_batch_that_is_leaving(shards: ScriptedShards) -> None:
    def hurry() -> None:
        shards.wire.on_send = lambda: None
        in_another_thread(lambda: shards.push(9, 4))

    shards.wire.on_send = hurry
    with shards.connections.batched():
        for number in range(3):
            shards.push(number, 4)
    assert numbers_of(shards.wire.sent) == [2, 9, 1, 0]


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
    assert "has left the job" in ends.get(timeout=SOON)
    waiter.join(SOON)
