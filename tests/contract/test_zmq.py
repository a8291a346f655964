"""What is particular to ZeroMQ."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import zmq

from hubring.ps.transport import registry
from hubring.ps.transport.base import Envelope, Listener, sealed
from hubring.ps.transport.zmq import socket as zmq_socket
from hubring.ps.transport.zmq.listener import ZmqListener
from hubring.ps.transport.zmq.transport import ZmqTransport
from tests.support.transports.messages import PATIENCE, await_loss, noise, number_of, replies, request
from tests.support.transports.serving import Answer, NotesDamage, Serving, connected, dealing, echo


def is_for_replies(name: bytes) -> bool:
    """Whether it is the second line of a pair: the first one's name of 16 random bytes, and one more."""
    return len(name) > 16


@pytest.mark.parametrize(("shards", "apart"), [(1, True), (2, False)])
def test_zmq_answers_who_has_one_shard_on_a_line_for_replies(shards: int, apart: bool) -> None:
    lines: list[Any] = []

    def answer(listener: Listener, envelope: Envelope) -> None:
        lines.append(envelope.reply_to)
        echo(listener, envelope)

    with Serving(ZmqTransport(), answer) as server:
        ways = registry.choose([registry.ShardAddress("", {"zmq": server.address})] * shards, "zmq")
        with contextlib.closing(ways.dial(0)) as line:
            for number in count() if apart else range(1000):  # they may overtake the word of the other line
                line.send(request(number))
                line.flush()
                assert [number_of(reply) for reply in replies(line, 1)] == [number]
                if is_for_replies(lines[-1]):
                    break
    assert is_for_replies(lines[-1]) == apart


@pytest.mark.parametrize(("apart", "heard"), [(False, False), (True, True), (True, False)])
def test_zmq_hands_out_long_last_words_before_it_tells_of_the_loss(
    apart: bool, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever line they come on: who has not heard of one for replies answers on the other."""
    for end in ("transport", "listener"):  # however busy the machine is
        monkeypatch.setattr(f"hubring.ps.transport.zmq.{end}.LINGER_MS", int(1000 * PATIENCE))
    count, payload, answered, heard_of_it = 4, noise(4 << 20), threading.Event(), threading.Event()
    asked: list[Envelope] = []
    hear = ZmqListener._add_reply_route

    def hear_or_not(listener: ZmqListener, line: bytes) -> None:
        if heard:
            hear(listener, line)
        heard_of_it.set()

    def answer_all_at_once(listener: Listener, envelope: Envelope) -> None:
        asked.append(envelope)
        for one in asked if len(asked) == count else ():
            listener.send(one.reply_to, request(number_of(one.message), payload), stable=True)
            answered.set()

    monkeypatch.setattr(ZmqListener, "_add_reply_route", hear_or_not)
    with (
        Serving(ZmqTransport(), answer_all_at_once) as server,
        contextlib.closing(ZmqTransport(apart=apart).dial(server.address, PATIENCE)) as line,
    ):
        assert not apart or heard_of_it.wait(PATIENCE)
        for number in range(count):
            line.send(request(number))
        line.flush()
        assert answered.wait(PATIENCE)
        ending = threading.Thread(target=server.stop)
        ending.start()
        came = replies(line, count)
        ending.join()
        assert sorted(number_of(reply) for reply in came) == list(range(count))
        await_loss(line)


@pytest.mark.parametrize("apart", [False, True])
def test_zmq_tells_of_a_loss_to_who_only_asked(apart: bool) -> None:
    with Serving(ZmqTransport(), lambda listener, envelope: None) as server:
        line = ZmqTransport(apart=apart).dial(server.address, PATIENCE)
        line.send(request(0))
        line.flush()
    with contextlib.closing(line):
        await_loss(line)


@pytest.mark.parametrize(
    ("host", "room"),
    [
        ("127.0.0.1", zmq_socket.READ_AHEAD_LOCAL),
        ("::1", zmq_socket.READ_AHEAD_LOCAL),
        ("10.0.0.1", zmq_socket.READ_AHEAD),
    ],
)
def test_zmq_reads_as_far_ahead_on_all_lines_that_share_a_link(host: str, room: int) -> None:
    sockets = zmq_socket.Sockets()
    for kind in (zmq.ROUTER, zmq.DEALER):
        socket = sockets.open(kind, host)
        assert socket.rcvbuf == room
        sockets.close(socket)


def test_zmq_answers_where_it_was_asked_whoever_had_a_line_for_replies_too_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hubring.ps.transport.zmq.listener.MAX_REPLY_ROUTES", 2)
    with Serving(ZmqTransport()) as server, contextlib.ExitStack() as stack:
        transport = ZmqTransport(apart=True)
        lines = [transport.dial(server.address, PATIENCE) for _ in range(5)]
        for line in lines:
            stack.callback(line.close)
        for number, line in enumerate(lines):
            line.send(request(number, noise(1 << 20)))
            line.flush()
            assert [number_of(reply) for reply in replies(line, 1)] == [number]


def test_zmq_passes_on_messages_of_the_wrong_form_as_damaged() -> None:
    answer = NotesDamage()
    with Serving(ZmqTransport(), answer) as server, dealing(server.address) as dealer:
        for parts in ([b"header", b"payload"], [sealed(request(7)), b"payload"]):
            dealer.send_multipart(parts)
            assert dealer.poll(int(1000 * PATIENCE))
            assert dealer.recv_multipart() == [sealed(request(7))]
    assert "a header of 6 bytes does not match its checksum; it came from 127.0.0.1" in answer.damage[0]
    assert "a payload of 7 bytes does not match its checksum" in answer.damage[1]


def hold(listening: threading.Event, answer: Answer) -> Answer:
    """Serves nobody before the event."""

    def answer_later(listener: Listener, envelope: Envelope) -> None:
        assert listening.wait(PATIENCE)
        answer(listener, envelope)

    return answer_later


def test_zmq_lets_urgent_messages_overtake_what_waits_both_ways() -> None:
    payload, arrived = noise(4 << 20), list[Envelope]()
    held, listening, answered = threading.Event(), threading.Event(), threading.Event()

    def answer_all_at_once(listener: Listener, envelope: Envelope) -> None:
        held.set()
        assert listening.wait(PATIENCE)
        arrived.append(envelope)
        if len(arrived) < 32:
            return
        for one in sorted(arrived, key=lambda one: number_of(one.message)):
            number = number_of(one.message)
            listener.send(one.reply_to, replace(request(number, payload), priority=number), stable=True)
        answered.set()

    with connected(ZmqTransport, answer_all_at_once) as (_, line):
        for number in range(32):
            line.send(replace(request(number, payload), priority=number))
            line.flush()
            assert held.wait(PATIENCE)  # with the first: both ends have read nothing ahead when all wait
        listening.set()
        while not answered.wait(0.001):
            line.flush()
        came = [number_of(reply) for reply in replies(line, 32)]
    for numbers in ([number_of(one.message) for one in arrived], came):
        assert numbers.index(31) < 16
        assert numbers[-1] < 16


def test_zmq_reads_from_its_workers_in_turn() -> None:
    """A worker that floods its shard holds up nobody: the other's request is not the last to be read."""
    transport, listening = ZmqTransport(), threading.Event()
    arrived: list[int] = []

    def note(listener: Listener, envelope: Envelope) -> None:
        arrived.append(number_of(envelope.message))
        echo(listener, envelope)

    with (
        Serving(transport, hold(listening, note)) as server,
        server.line() as flood,
        server.line() as trickle,
    ):
        payload = noise(1 << 20)
        for number in range(100):
            flood.send(request(number, payload))
        flood.flush()
        trickle.send(request(1000, payload))
        trickle.flush()
        listening.set()
        replies(trickle)
        replies(flood, 100)
    assert arrived.index(1000) < 50


def test_a_damaged_message_without_an_address_of_its_peer_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeroMQ forgets the address of a peer that is gone, and then `Frame.get` raises."""
    with contextlib.closing(ZmqTransport().listen("127.0.0.1")) as listener:
        frames = [zmq.Frame(b"route"), zmq.Frame(b"no header")]  # no socket has received them
        with pytest.raises(zmq.ZMQError):
            frames[1].get("Peer-Address")
        monkeypatch.setattr("hubring.ps.transport.zmq.listener.receive", lambda router: iter([frames]))
        (envelope,) = listener.receive()
    assert envelope.reply_to == b"route"
    assert envelope.message.header == b""
    assert envelope.message.damage.endswith("it came from an unknown address")
