"""Checks for every transport: many requests and clients at the same time, and closed or lost connections."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hubring.ps.core.errors import ConnectionLost, ServerUnreachable
from hubring.ps.transport.base import Connection, Envelope, Listener, Message
from tests.support.transports.messages import (
    PATIENCE,
    ask,
    await_loss,
    await_readable,
    content,
    noise,
    number_of,
    replies,
    request,
)
from tests.support.transports.serving import MakeTransport, Serving, answers, connected, echo


def answers_many_requests_in_any_order(make_transport: MakeTransport) -> None:
    """Sends never block, even with hundreds of open requests that are answered in reverse order."""
    count, held = 1500, list[Envelope]()

    def answer_backward(listener: Listener, envelope: Envelope) -> None:
        held.append(envelope)
        if len(held) == count:
            for one in reversed(held):
                echo(listener, one)

    with connected(make_transport, answer_backward) as (_, line):
        for number in range(count):
            line.send(request(number, noise(number % 100, number)))
        came = replies(line, count)
    assert sorted(number_of(reply) for reply in came) == list(range(count))
    for reply in came:
        assert content(reply) == bytes(noise(number_of(reply) % 100, number_of(reply)))


def serves_several_clients_at_once(make_transport: MakeTransport) -> None:
    """No client gets another client's replies."""
    transport = make_transport()
    faults: list[BaseException] = []

    def talk(where: str, client: int) -> None:
        try:
            with contextlib.closing(transport.dial(where, PATIENCE)) as line:
                for number in range(10):
                    sent = request(number, noise(100_000, 100 * client + number), f"client {client}")
                    assert content(ask(line, sent)) == content(sent)
        except BaseException as error:
            faults.append(error)

    with Serving(transport) as server:
        clients = [threading.Thread(target=talk, args=(server.address, client)) for client in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(PATIENCE)
    assert not faults, faults


def goes_from_thread_to_thread(make_transport: MakeTransport) -> None:
    """One thread dials, another sends while a third waits and reads, a fourth closes."""
    transport = make_transport()
    sent = [request(number, noise(100_000, number)) for number in range(10)]
    came: list[Message] = []

    def send(line: Connection) -> None:
        for message in sent:
            line.send(message)
            line.flush()

    with Serving(transport) as server, ThreadPoolExecutor(1) as dialler:
        line = dialler.submit(transport.dial, server.address, PATIENCE).result(PATIENCE)
        with ThreadPoolExecutor(1) as sender:
            sending = sender.submit(send, line)
            with ThreadPoolExecutor(1) as reader:
                reader.submit(await_readable, line).result(PATIENCE)
                sending.result(PATIENCE)
                came += reader.submit(replies, line, len(sent)).result(PATIENCE)
        line.close()
    assert {number_of(reply): content(reply) for reply in came} == {
        number_of(message): content(message) for message in sent
    }


def overtakes_only_by_priority(make_transport: MakeTransport) -> None:
    """Waiting requests and replies keep their order; only a higher priority goes first."""
    count, held, ready = 48, list[Envelope](), threading.Event()
    priorities = random.Random(0).choices(range(8), k=count)
    payload = noise(1 << 20)

    def answer_all_at_once(listener: Listener, envelope: Envelope) -> None:
        assert ready.wait(PATIENCE)
        held.append(envelope)
        if len(held) == count:
            for one in sorted(held, key=lambda each: number_of(each.message)):
                number = number_of(one.message)
                reply = replace(request(number, payload), priority=priorities[number])
                listener.send(one.reply_to, reply, stable=True)

    with connected(make_transport, answer_all_at_once) as (_, line):
        for number, priority in enumerate(priorities):
            line.send(replace(request(number, payload), priority=priority))
            line.flush()
        ready.set()
        came = replies(line, count)
    for arrived in ([number_of(each.message) for each in held], [number_of(reply) for reply in came]):
        assert sorted(arrived) == list(range(count))
        for place, late in enumerate(arrived):
            overtaken = [early for early in arrived[place:] if early < late]
            assert all(priorities[early] < priorities[late] for early in overtaken), f"{late} came too early"


def answers_others_while_one_does_not_read(make_transport: MakeTransport) -> None:
    """A client that does not read its replies blocks no other client."""
    payload = noise(1 << 20)
    serving = Serving(make_transport(), answers(payload))
    with serving as server, server.line() as sleeper, server.line() as reader:
        for number in range(64):
            sleeper.send(request(number))
        sleeper.flush()
        for number in range(4):
            assert content(ask(reader, request(number))) == bytes(payload)
        assert len(replies(sleeper, 64)) == 64


def outlives_a_client_that_leaves(make_transport: MakeTransport) -> None:
    """A client that leaves with an open request affects no other client; its reply is dropped."""
    held: list[Envelope] = []
    came = threading.Event()

    def hold_the_first(listener: Listener, envelope: Envelope) -> None:
        held.append(envelope)
        came.set()
        if number_of(envelope.message) > 1:
            for one in held:
                echo(listener, one)
            held.clear()

    transport = make_transport()
    with Serving(transport, hold_the_first) as server, server.line() as stayer:
        with server.line() as leaver:
            payload = transport.allocate(100_000)
            leaver.send(request(1, payload), payload)
            leaver.flush()
            assert came.wait(PATIENCE)
        for number in (2, 3):
            assert number_of(ask(stayer, request(number, noise(100_000)))) == number


def hands_out_last_replies_then_tells_of_the_loss(make_transport: MakeTransport) -> None:
    """Replies sent before the loss arrive; after that every call raises, idle or not."""
    transport = make_transport()
    answered = threading.Event()

    def echo_and_tell(listener: Listener, envelope: Envelope) -> None:
        echo(listener, envelope)
        answered.set()

    with Serving(transport, echo_and_tell) as server:
        idle, busy = (transport.dial(server.address, PATIENCE) for _ in range(2))
        busy.send(request(1, noise(10)))
        busy.flush()
        assert answered.wait(PATIENCE)
    assert number_of(replies(busy)[0]) == 1
    for line in (idle, busy):
        for _ in range(2):  # the connection stays lost
            await_loss(line)
        with contextlib.suppress(ConnectionLost):
            line.send(request(2))
            line.flush()
        await_loss(line)
        line.close()


def closes_twice(make_transport: MakeTransport) -> None:
    """A second close does nothing."""
    transport = make_transport()
    with Serving(transport) as server:
        line = transport.dial(server.address, PATIENCE)
        line.close()
        line.close()
    listener = transport.listen("127.0.0.1")
    listener.close()
    listener.close()


def refuses_a_dead_address_in_time(make_transport: MakeTransport) -> None:
    """Without a listener `dial` raises, and the message names the address."""
    transport = make_transport()
    with Serving(transport) as server:
        dead = server.address
    began = time.monotonic()
    refusal = ""
    try:
        transport.dial(dead, PATIENCE / 2)
    except ServerUnreachable as error:
        refusal = str(error)
    assert dead in refusal, f"the address {dead} without a listener is missing in: {refusal}"
    assert time.monotonic() - began < PATIENCE


def leaves_nothing_behind(make_transport: MakeTransport) -> None:
    """The number of descriptors and threads does not grow, with or without open requests."""

    def use() -> None:
        with connected(make_transport) as (transport, line):
            into = transport.allocate(1 << 20)
            ask(line, request(1, noise(1 << 20)), into)
            ask(line, request(2, into))
            line.send(request(3, noise(1 << 20)))
            line.flush()

    use()  # now libraries have allocated their process-wide resources
    before = _held()
    for _ in range(3):
        use()
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while (left := _held()) > before and time.monotonic() < deadline:
        threading.Event().wait(0.01)  # libraries' threads close their files later
    assert left <= before, f"{left} descriptors and threads, {before} before"


def _held() -> int:
    return len(os.listdir("/proc/self/fd")) + threading.active_count()
