"""What every transport must do: one check each, run on all of them by the tests.

    @pytest.mark.parametrize("check", CHECKS)
    def test_zmq(check): check(ZmqTransport)

A check gets a function that makes a transport, takes one transport for both
ends, and waits for nothing longer than PATIENCE.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from hubring.protos import data_pb2 as pb
from hubring.ps.core.errors import ConnectionLost, ServerUnreachable
from hubring.ps.transport.base import MAX_HEADER, Connection, Envelope, Listener, Message, Transport
from hubring.ps.transport.bell import Bell
from hubring.ps.transport.memory import ALIGNMENT, address

PATIENCE = 10.0
"""Seconds after which a check gives up."""

SIZES = (0, 1, 7, 64 << 10, (5 << 20) + 3)
"""Bytes: nothing, less than a word, a chunk, and more than a chunk that ends askew."""

MakeTransport = Callable[[], Transport]
Answer = Callable[[Listener, Envelope], None]


def request(number: int, payload: memoryview | None = None, text: str = "") -> Message:
    """A message that every transport carries."""
    nbytes = payload.nbytes if payload is not None else 0
    header = pb.Header(request=number, payload_bytes=nbytes, contribute=pb.Contribute(name=text))
    return Message(header.SerializeToString(), payload)


def number_of(message: Message) -> int:
    """The number that was given to `request`."""
    return pb.Header.FromString(message.header).request


def content(message: Message) -> bytes:
    """The payload; none and an empty one are the same."""
    return b"" if message.payload is None else bytes(message.payload)


def noise(nbytes: int, seed: int = 0) -> memoryview:
    """Bytes from nowhere a transport knows, the same for the same seed."""
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


def echo(listener: Listener, envelope: Envelope) -> None:
    """Answers with what came."""
    listener.send(envelope.reply_to, envelope.message, stable=True)


class Serving:
    """A thread that opens a listener, polls it as a shard does, and hands each request to `answer`."""

    def __init__(self, transport: Transport, answer: Answer = echo) -> None:
        self._transport = transport
        self._answer = answer
        self._bell = Bell()
        self._opened: Future[str] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="serving")

    def __enter__(self) -> Serving:
        self._thread.start()
        self.address = self._opened.result(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Closes the listener; raises what went wrong in the thread."""
        self._bell.ring()
        self._thread.join(PATIENCE)
        self._ended.result(0)
        self._bell.close()

    def _run(self) -> None:
        try:
            listener = self._transport.listen("127.0.0.1")
            self._opened.set_result(listener.address)
            with contextlib.closing(listener):
                self._serve(listener)
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    def _serve(self, listener: Listener) -> None:
        poller = select.poll()
        poller.register(self._bell.waitable, select.POLLIN)
        poller.register(listener.waitable, select.POLLIN)
        while self._bell.waitable not in (ready := dict(poller.poll())):
            assert listener.waitable in ready
            for envelope in listener.receive():
                self._answer(listener, envelope)
            listener.flush()


def await_readable(connection: Connection) -> None:
    """Returns once the connection has something to say."""
    poller = select.poll()
    poller.register(connection.waitable, select.POLLIN)
    assert poller.poll(int(1000 * PATIENCE)), f"nothing to read within {PATIENCE:g} s"


def replies(connection: Connection, count: int = 1) -> list[Message]:
    """The next `count` replies."""
    connection.flush()
    messages: list[Message] = []
    while len(messages) < count:
        await_readable(connection)
        messages += connection.receive()
    assert len(messages) == count, f"{len(messages)} replies where {count} were due"
    return messages


def ask(connection: Connection, message: Message, into: memoryview | None = None) -> Message:
    """Sends one request and returns its reply."""
    connection.send(message, into)
    (reply,) = replies(connection)
    return reply


def await_loss(connection: Connection) -> None:
    """Returns once the connection has told that it is lost."""
    while True:
        await_readable(connection)
        try:
            assert not connection.receive(), "a reply out of nowhere"
        except ConnectionLost:
            return


# The checks.


def echoes_every_size(make_transport: MakeTransport) -> None:
    """Header and payload come back as they went, whatever the size."""
    transport = make_transport()
    with Serving(transport) as server, contextlib.closing(transport.dial(server.address, PATIENCE)) as line:
        for number, size in enumerate(SIZES):
            sent = request(number, noise(size), "a name")
            reply = ask(line, sent)
            assert reply.header == sent.header
            assert content(reply) == content(sent), f"{size} bytes came back otherwise"
        assert content(ask(line, request(9))) == b""


def carries_headers_up_to_the_bound(make_transport: MakeTransport) -> None:
    """MAX_HEADER bytes are not too many."""
    transport = make_transport()
    with Serving(transport) as server, contextlib.closing(transport.dial(server.address, PATIENCE)) as line:
        sent = request(1, None, "n" * (MAX_HEADER - 16))
        assert MAX_HEADER - 16 < len(sent.header) <= MAX_HEADER
        assert ask(line, sent).header == sent.header


def allocates_memory_to_send_from(make_transport: MakeTransport) -> None:
    """Memory from `allocate` is zeroed, aligned, writable, and sent right, in parts too."""
    transport = make_transport()
    with Serving(transport) as server, contextlib.closing(transport.dial(server.address, PATIENCE)) as line:
        for number, size in enumerate(SIZES):
            memory = transport.allocate(size)
            assert address(memory) % ALIGNMENT == 0
            assert memory.nbytes == size
            assert not any(memory[:4096]), "memory is not zeroed"
            memory[:] = noise(size, number)
            assert content(ask(line, request(number, memory))) == bytes(memory)
            assert content(ask(line, request(number, memory[1:-1]))) == bytes(memory[1:-1])


def lands_replies_where_asked_or_brings_them(make_transport: MakeTransport) -> None:
    """With `landed` the bytes are in `into`, and nowhere beyond; without, they are in the payload."""
    transport = make_transport()
    with Serving(transport) as server, contextlib.closing(transport.dial(server.address, PATIENCE)) as line:
        payload = noise((3 << 20) + 1)
        exact, roomy, small = (transport.allocate(payload.nbytes + more) for more in (0, 64, -1))
        for number, into in enumerate((exact, roomy, small, memoryview(bytearray(payload.nbytes)))):
            reply = ask(line, request(number, payload), into)
            assert content(reply) == bytes(payload)
            if reply.landed:
                assert bytes(into[: payload.nbytes]) == bytes(payload)
        assert bytes(roomy[payload.nbytes :]) == bytes(64), "wrote beyond the payload"
        assert not ask(line, request(8, payload), small).landed
        assert not ask(line, request(9), exact).landed


def shows_what_the_reply_said_until_the_next(make_transport: MakeTransport) -> None:
    """In a window stands what the last reply brought; what either side writes, the other does not see.

    That holds for replies that stay and for those that change, and outlives the connection.
    """
    transport = make_transport()
    held = transport.allocate(3 * 4096 + 5)

    def answer(listener: Listener, envelope: Envelope) -> None:
        held[:] = content(envelope.message)
        header, stable = envelope.message.header, number_of(envelope.message) != 3
        listener.send(envelope.reply_to, Message(header, held), stable)

    with Serving(transport, answer) as server:
        with contextlib.closing(transport.dial(server.address, PATIENCE)) as line:
            window = transport.window(held.nbytes)
            for number in range(1, 6):
                said = noise(held.nbytes, seed=number)
                assert content(ask(line, request(number, said), window)) == bytes(said)
                window[4095:4097] = b"!!"
                window[-1:] = b"!"
                assert bytes(held) == bytes(said)
        kept = bytes(window)
        held[:] = noise(held.nbytes)
        assert kept == bytes(window)


def fills_the_parts_of_a_window_apart(make_transport: MakeTransport) -> None:
    """Replies that land side by side in one window, wherever pages begin, leave each other alone."""
    transport = make_transport()
    parts = [transport.allocate(nbytes) for nbytes in (64, 4096, 3 * 4096, 8192, 100)]

    def answer(listener: Listener, envelope: Envelope) -> None:
        number = number_of(envelope.message)
        listener.send(envelope.reply_to, request(number, parts[number]), stable=True)

    with (
        Serving(transport, answer) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        window = transport.window(sum(part.nbytes for part in parts))
        ends = list(itertools.accumulate(part.nbytes for part in parts))
        places = [window[end - part.nbytes : end] for part, end in zip(parts, ends, strict=True)]
        for turn in range(2):
            for number, part in enumerate(parts):
                part[:] = noise(part.nbytes, seed=10 * turn + number)
            replies = [ask(line, request(number), place) for number, place in enumerate(places)]
            for part, place, reply in zip(parts, places, replies, strict=True):
                assert bytes(place if reply.landed else content(reply)) == bytes(part)


def lands_replies_over_their_own_request(make_transport: MakeTransport) -> None:
    """A reply may land on the memory that its request was sent from."""

    def reverse(listener: Listener, envelope: Envelope) -> None:
        payload = memoryview(content(envelope.message)[::-1])
        listener.send(envelope.reply_to, Message(envelope.message.header, payload), stable=False)

    transport = make_transport()
    with (
        Serving(transport, reverse) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        memory = transport.allocate(100_000)
        memory[:] = noise(100_000)
        due = bytes(memory)[::-1]
        reply = ask(line, request(1, memory), memory)
        assert content(reply) == due


def answers_many_requests_in_any_order(make_transport: MakeTransport) -> None:
    """Nobody waits for room: not with hundreds of requests under way, answered backward."""
    count, held = 1500, list[Envelope]()

    def answer_backward(listener: Listener, envelope: Envelope) -> None:
        held.append(envelope)
        if len(held) == count:
            for one in reversed(held):
                echo(listener, one)

    transport = make_transport()
    with (
        Serving(transport, answer_backward) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        for number in range(count):
            line.send(request(number, noise(number % 100, number)))
        came = replies(line, count)
    assert sorted(number_of(reply) for reply in came) == list(range(count))
    for reply in came:
        assert content(reply) == bytes(noise(number_of(reply) % 100, number_of(reply)))


def serves_several_clients_at_once(make_transport: MakeTransport) -> None:
    """No client gets what is another's."""
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
    """One thread dials, another sends while a third waits for news and reads, a fourth closes."""
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


def keeps_replies_that_change_after_sending(make_transport: MakeTransport) -> None:
    """A reply that is not stable is copied in time."""
    scratch = noise(2 << 20)
    due = bytes(scratch)

    def answer_and_overwrite(listener: Listener, envelope: Envelope) -> None:
        scratch[:] = due
        header = pb.Header(request=number_of(envelope.message), payload_bytes=scratch.nbytes)
        listener.send(envelope.reply_to, Message(header.SerializeToString(), scratch), stable=False)
        scratch[:] = bytes(scratch.nbytes)

    transport = make_transport()
    with (
        Serving(transport, answer_and_overwrite) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        into = transport.allocate(scratch.nbytes)
        for number in range(4):
            line.send(request(number), into if number == 0 else None)
        assert all(content(reply) == due for reply in replies(line, 4))


def overtakes_only_by_priority(make_transport: MakeTransport) -> None:
    """Where requests or replies wait, none goes before an earlier one but for a higher priority."""
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

    transport = make_transport()
    with (
        Serving(transport, answer_all_at_once) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
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


def keeps_what_waits_where_it_is(make_transport: MakeTransport) -> None:
    """Neither end reads for a while: what is sent to it waits without being copied."""
    transport = make_transport()
    # 512 MiB each way: what gRPC holds of it, and has freed and not given back, was 15 to 115 on busy cores.
    payload, count, reading = transport.allocate(4 << 20), 128, threading.Event()

    def answer_in_time(listener: Listener, envelope: Envelope) -> None:
        assert reading.wait(PATIENCE)
        number = number_of(envelope.message)
        reply = request(number, None if number % 2 else payload)
        listener.send(envelope.reply_to, reply, stable=True)

    with (
        Serving(transport, answer_in_time) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
    ):
        before = _forget_peak()
        for number in range(2 * count):
            line.send(request(number, payload if number % 2 else None))
        line.flush()
        poller = select.poll()
        poller.register(line.waitable, select.POLLIN)
        for _ in range(20):  # time in which a transport that copies would do so
            if poller.poll(10):
                assert not line.receive()
        reading.set()
        threading.Event().wait(0.2)
        left = 2 * count
        while left:
            await_readable(line)
            left -= len(line.receive())
        grown = _peak() - before
    assert grown < count * payload.nbytes / 2, f"{grown >> 20} MiB for what waited"


def answers_others_while_one_does_not_read(make_transport: MakeTransport) -> None:
    """A client that leaves its replies lying holds up nobody else."""
    payload = noise(1 << 20)

    def answer_at_length(listener: Listener, envelope: Envelope) -> None:
        listener.send(envelope.reply_to, request(number_of(envelope.message), payload), stable=True)

    transport = make_transport()
    with (
        Serving(transport, answer_at_length) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as sleeper,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as reader,
    ):
        for number in range(64):
            sleeper.send(request(number))
        sleeper.flush()
        for number in range(4):
            assert content(ask(reader, request(number))) == bytes(payload)
        assert len(replies(sleeper, 64)) == 64


def outlives_a_client_that_leaves(make_transport: MakeTransport) -> None:
    """A client that leaves with a request open harms nobody; its reply goes nowhere."""
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
    with (
        Serving(transport, hold_the_first) as server,
        contextlib.closing(transport.dial(server.address, PATIENCE)) as stayer,
    ):
        with contextlib.closing(transport.dial(server.address, PATIENCE)) as leaver:
            payload = transport.allocate(100_000)
            leaver.send(request(1, payload), payload)
            leaver.flush()
            assert came.wait(PATIENCE)
        for number in (2, 3):
            assert number_of(ask(stayer, request(number, noise(100_000)))) == number


def hands_out_last_replies_then_tells_of_the_loss(make_transport: MakeTransport) -> None:
    """What was answered before the end arrives; then every call tells of the loss, idle or not."""
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
        for _ in range(2):  # it stays lost
            await_loss(line)
        with contextlib.suppress(ConnectionLost):
            line.send(request(2))
            line.flush()
        await_loss(line)
        line.close()


def closes_twice(make_transport: MakeTransport) -> None:
    """Closing what is closed does nothing."""
    transport = make_transport()
    with Serving(transport) as server:
        line = transport.dial(server.address, PATIENCE)
        line.close()
        line.close()
    listener = transport.listen("127.0.0.1")
    listener.close()
    listener.close()


def refuses_a_dead_address_in_time(make_transport: MakeTransport) -> None:
    """Where nobody listens, `dial` says so, and names the address."""
    transport = make_transport()
    with Serving(transport) as server:
        dead = server.address
    began = time.monotonic()
    refusal = ""
    try:
        transport.dial(dead, PATIENCE / 2)
    except ServerUnreachable as error:
        refusal = str(error)
    assert dead in refusal, f"dialled {dead}, where nobody listens any more: {refusal}"
    assert time.monotonic() - began < PATIENCE


def leaves_nothing_behind(make_transport: MakeTransport) -> None:
    """Descriptors and threads are as many as before, requests under way or not."""

    def use() -> None:
        transport = make_transport()
        with (
            Serving(transport) as server,
            contextlib.closing(transport.dial(server.address, PATIENCE)) as line,
        ):
            into = transport.allocate(1 << 20)
            ask(line, request(1, noise(1 << 20)), into)
            ask(line, request(2, into))
            line.send(request(3, noise(1 << 20)))
            line.flush()

    use()  # what a library keeps for the whole process, it has by now
    before = _held()
    for _ in range(3):
        use()
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while (left := _held()) > before and time.monotonic() < deadline:
        threading.Event().wait(0.01)  # libraries' own threads close their files in their own time
    assert left <= before, f"{left} descriptors and threads, {before} before"


def _forget_peak() -> int:
    """Bytes of memory that this process holds now; its peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Most bytes of memory that this process held at a time."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _held() -> int:
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


CHECKS: tuple[Callable[[MakeTransport], None], ...] = (
    echoes_every_size,
    carries_headers_up_to_the_bound,
    allocates_memory_to_send_from,
    lands_replies_where_asked_or_brings_them,
    shows_what_the_reply_said_until_the_next,
    fills_the_parts_of_a_window_apart,
    lands_replies_over_their_own_request,
    answers_many_requests_in_any_order,
    serves_several_clients_at_once,
    goes_from_thread_to_thread,
    keeps_replies_that_change_after_sending,
    overtakes_only_by_priority,
    keeps_what_waits_where_it_is,
    answers_others_while_one_does_not_read,
    outlives_a_client_that_leaves,
    hands_out_last_replies_then_tells_of_the_loss,
    closes_twice,
    refuses_a_dead_address_in_time,
    leaves_nothing_behind,
)
