"""Checks for every transport: bytes arrive unchanged and at the right place."""

from __future__ import annotations

import itertools
import select
import threading
from pathlib import Path

from hubring.protos import data_pb2 as pb
from hubring.ps.transport.base import MAX_HEADER, Envelope, Listener, Message
from hubring.ps.transport.mapping import ALIGNMENT, address
from tests.support.transports.messages import (
    PATIENCE,
    ask,
    await_readable,
    content,
    noise,
    number_of,
    replies,
    request,
)
from tests.support.transports.serving import MakeTransport, Serving, connected

SIZES = (0, 1, 7, 64 << 10, (5 << 20) + 3)
"""Sizes in bytes: zero, less than a word, one chunk, and more than a chunk with an odd end."""


def echoes_every_size(make_transport: MakeTransport) -> None:
    """Header and payload return unchanged, for every size."""
    with connected(make_transport) as (_, line):
        for number, size in enumerate(SIZES):
            sent = request(number, noise(size), "a name")
            reply = ask(line, sent)
            assert reply.header == sent.header
            assert content(reply) == content(sent), f"{size} bytes came back otherwise"
        assert content(ask(line, request(9))) == b""


def carries_headers_up_to_the_bound(make_transport: MakeTransport) -> None:
    """A header of MAX_HEADER bytes is accepted."""
    with connected(make_transport) as (_, line):
        sent = request(1, None, "n" * (MAX_HEADER - 16))
        assert MAX_HEADER - 16 < len(sent.header) <= MAX_HEADER
        assert ask(line, sent).header == sent.header


def allocates_memory_to_send_from(make_transport: MakeTransport) -> None:
    """Memory from `allocate` is zeroed, aligned and writable, and arrives correctly, in parts too."""
    with connected(make_transport) as (transport, line):
        for number, size in enumerate(SIZES):
            memory = transport.allocate(size)
            assert address(memory) % ALIGNMENT == 0
            assert memory.nbytes == size
            assert not any(memory[:4096]), "memory is not zeroed"
            memory[:] = noise(size, number)
            assert content(ask(line, request(number, memory))) == bytes(memory)
            assert content(ask(line, request(number, memory[1:-1]))) == bytes(memory[1:-1])


def lands_replies_where_asked_or_brings_them(make_transport: MakeTransport) -> None:
    """With `landed` the bytes are in `into` and not beyond it; without `landed` they are in the payload."""
    with connected(make_transport) as (transport, line):
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
    """A window holds the bytes of the last reply; neither end sees later writes of the other.

    This holds for stable and unstable replies, and after the connection ends. Writes are reported, exactly,
    and hide what lands until they are forgotten.
    """
    transport = make_transport()
    held = transport.allocate(3 * 4096 + 5)
    parts = [4096, 4097, 4098, 3 * 4096 + 1, held.nbytes]

    def answer(listener: Listener, envelope: Envelope) -> None:
        held[:] = content(envelope.message)
        header, stable = envelope.message.header, number_of(envelope.message) != 3
        listener.send(envelope.reply_to, Message(header, held), stable)

    with Serving(transport, answer) as server:
        with server.line() as line:
            window = transport.window(held.nbytes)
            for number in range(1, 6):
                said = noise(held.nbytes, seed=number)
                reply = ask(line, request(number, said), window.landing)
                assert content(reply) == bytes(said)
                if not reply.landed:
                    window.landing[:] = content(reply)
                window.forget()
                assert bytes(window.seen) == bytes(said)
                assert window.written(parts) == []
                window.seen[4095:4097] = b"!!"
                window.seen[-1:] = b"!"
                assert window.written(parts) == window.written(parts) == [0, 1, 4]
                assert bytes(held) == bytes(window.landing) == bytes(said)
        kept = bytes(window.seen)
        held[:] = noise(held.nbytes)
        assert kept == bytes(window.seen)
        assert window.written(parts) == [0, 1, 4]


def fills_the_parts_of_a_window_apart(make_transport: MakeTransport) -> None:
    """Replies that land next to each other in one window do not affect each other, at any page offset."""
    transport = make_transport()
    parts = [transport.allocate(nbytes) for nbytes in (64, 4096, 3 * 4096, 8192, 100)]

    def answer(listener: Listener, envelope: Envelope) -> None:
        number = number_of(envelope.message)
        listener.send(envelope.reply_to, request(number, parts[number]), stable=True)

    with connected(lambda: transport, answer) as (_, line):
        window = transport.window(sum(part.nbytes for part in parts)).landing
        ends = list(itertools.accumulate(part.nbytes for part in parts))
        places = [window[end - part.nbytes : end] for part, end in zip(parts, ends, strict=True)]
        for turn in range(2):
            for number, part in enumerate(parts):
                part[:] = noise(part.nbytes, seed=10 * turn + number)
            replies = [ask(line, request(number), place) for number, place in enumerate(places)]
            for part, place, reply in zip(parts, places, replies, strict=True):
                assert bytes(place if reply.landed else content(reply)) == bytes(part)


def lands_replies_over_their_own_request(make_transport: MakeTransport) -> None:
    """A reply can land in the memory from which its request was sent."""

    def reverse(listener: Listener, envelope: Envelope) -> None:
        payload = memoryview(content(envelope.message)[::-1])
        listener.send(envelope.reply_to, Message(envelope.message.header, payload), stable=False)

    with connected(make_transport, reverse) as (transport, line):
        memory = transport.allocate(100_000)
        memory[:] = noise(100_000)
        due = bytes(memory)[::-1]
        reply = ask(line, request(1, memory), memory)
        assert content(reply) == due


def keeps_replies_that_change_after_sending(make_transport: MakeTransport) -> None:
    """An unstable reply is copied before it changes."""
    scratch = noise(2 << 20)
    due = bytes(scratch)

    def answer_and_overwrite(listener: Listener, envelope: Envelope) -> None:
        scratch[:] = due
        header = pb.Header(request=number_of(envelope.message), payload_bytes=scratch.nbytes)
        listener.send(envelope.reply_to, Message(header.SerializeToString(), scratch), stable=False)
        scratch[:] = bytes(scratch.nbytes)

    with connected(make_transport, answer_and_overwrite) as (transport, line):
        into = transport.allocate(scratch.nbytes)
        for number in range(4):
            line.send(request(number), into if number == 0 else None)
        assert all(content(reply) == due for reply in replies(line, 4))


def keeps_what_waits_where_it_is(make_transport: MakeTransport) -> None:
    """While neither end reads, sent payloads wait without a copy."""
    transport = make_transport()
    # 512 MiB each way. gRPC held 15 to 115 MiB of it on busy cores, including freed but not returned memory.
    payload, count, reading = transport.allocate(4 << 20), 128, threading.Event()

    def answer_in_time(listener: Listener, envelope: Envelope) -> None:
        assert reading.wait(PATIENCE)
        number = number_of(envelope.message)
        reply = request(number, None if number % 2 else payload)
        listener.send(envelope.reply_to, reply, stable=True)

    with connected(lambda: transport, answer_in_time) as (_, line):
        before = _forget_peak()
        for number in range(2 * count):
            line.send(request(number, payload if number % 2 else None))
        line.flush()
        poller = select.poll()
        poller.register(line.waitable, select.POLLIN)
        for _ in range(20):  # time for a copying transport to copy
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


def _forget_peak() -> int:
    """Returns this process's memory in bytes, and resets its peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Returns this process's peak memory in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
