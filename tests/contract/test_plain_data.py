"""Without CURVE, a peer on the path reads gradients, and no more; one that took a port gets nothing.

That is so with `--plain-data`, and on loopback.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from itertools import count

import pytest
import torch
import zmq

from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.core.messages import Pull, Push
from hubring.ps.core.types import INCARNATION_BYTES, Sender, new_incarnation
from hubring.ps.security.access import ShardKey, make_lock
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.base import DamagedHeader, Envelope, Listener, Message, sealed
from hubring.ps.transport.decode import decode_request
from hubring.ps.transport.encode import encode_request
from hubring.ps.transport.zmq import transport
from hubring.ps.transport.zmq.keyed_seal import KeyedSeal
from hubring.ps.transport.zmq.socket import PART_BYTES, QUESTION, Sockets
from hubring.ps.transport.zmq.transport import ATTEMPTS, ZmqConnection, ZmqTransport
from tests.support.processes.ports import free_port
from tests.support.transports.conformance import CHECKS
from tests.support.transports.connection_checks import overtakes_only_by_priority
from tests.support.transports.impostor import impostor, read_frame
from tests.support.transports.messages import PATIENCE, ask, noise, number_of, request
from tests.support.transports.one_shard import SOON, OneShard, begin, push
from tests.support.transports.relay import BitFlip, Recorder, Relay
from tests.support.transports.serving import MakeTransport, NotesDamage, Serving, dealing
from tests.support.transports.thief import zmq_thief

LOCK = make_lock(tls=True, curve=False)
MEMBER = Sender(3, new_incarnation(7))


class PlainData(ZmqTransport):
    """Both ends of ZeroMQ as with `--plain-data`."""

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__(apart=apart, lock=LOCK)

    def dial(self, address: str, timeout: float, key: ShardKey = LOCK.key) -> ZmqConnection:
        return super().dial(address, timeout, key)


def ends(name: bytes = b"n" * 16, secret: bytes = b"s" * 32) -> tuple[KeyedSeal, KeyedSeal]:
    """The worker's and the shard's end of one connection."""
    return KeyedSeal(secret, name, serves=False, numbers=count()), KeyedSeal(
        secret, name, serves=True, numbers=count()
    )


def test_only_encrypted_shards_without_curve_have_a_key() -> None:
    assert LOCK.key.data_key == bytes.fromhex(LOCK.secret)
    assert make_lock(tls=True, curve=True).key.data_key == b""
    assert make_lock(tls=False, curve=False).key.data_key == b""


@pytest.mark.parametrize("check", CHECKS)
def test_plain_data_passes_the_checks_of_every_transport(check: Callable[[MakeTransport], None]) -> None:
    check(PlainData)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("check", [check for check in CHECKS if check is not overtakes_only_by_priority])
def test_plain_data_passes_the_checks_with_separate_replies(check: Callable[[MakeTransport], None]) -> None:
    check(lambda: PlainData(apart=True))


def test_no_part_of_a_message_shows_an_incarnation() -> None:
    sniffer = Recorder()

    def answer(listener: Listener, envelope: Envelope) -> None:
        _, found = decode_request(envelope.message)
        assert isinstance(found, Push)
        assert found.sender == MEMBER
        listener.send(envelope.reply_to, request(1), stable=True)

    asked = encode_request(Push(MEMBER, 0, 0, torch.full((4,), 3.5), {}), 1)
    with (
        Serving(PlainData(), answer) as server,
        server.behind(lambda port: Relay(port, sniffer, sniffer)),
        server.line() as line,
    ):
        assert number_of(ask(line, asked)) == 1
    passed = bytes(sniffer.seen)
    assert torch.full((4,), 3.5).numpy().tobytes() in passed, "gradients are in clear"
    assert b"PLAIN" in passed
    assert LOCK.secret.encode() not in passed
    assert LOCK.key.data_key not in passed
    assert MEMBER.incarnation.to_bytes(INCARNATION_BYTES) not in passed
    assert MEMBER.incarnation.to_bytes(24)[8:] not in passed


@pytest.mark.parametrize("part", ["first", "payload"])
def test_a_message_changed_on_the_path_is_refused(part: str) -> None:
    worker, shard = ends()
    payload = noise(100)
    first = bytearray(worker.seal(request(1, payload)))
    (first if part == "first" else payload)[50 % len(first)] ^= 1
    with pytest.raises(DamagedHeader, match="was changed, or made without the connection's key"):
        shard.open(bytes(first), payload)


def test_a_first_part_of_any_length_is_refused() -> None:
    _, shard = ends()
    for nbytes in range(100):
        with pytest.raises(DamagedHeader):
            shard.open(bytes(nbytes), None)


def test_a_request_counts_once_and_not_as_a_reply_or_on_another_connection_or_shard() -> None:
    worker, shard = ends()
    first, second = worker.seal(request(1)), worker.seal(request(2))
    assert number_of(shard.open(first, None)) == 1
    assert number_of(shard.open(second, None)) == 2
    for again in (first, second):
        with pytest.raises(DamagedHeader, match="came again"):
            shard.open(again, None)
    for other in (worker, ends(name=b"o" * 16)[1], ends(secret=b"t" * 32)[1]):
        with pytest.raises(DamagedHeader, match="without the connection's key"):
            other.open(first, None)


def test_replies_come_from_the_shard_in_any_order() -> None:
    worker, shard = ends()
    replies = [shard.seal(request(number, noise(10))) for number in range(3)]
    assert [number_of(worker.open(each, noise(10))) for each in reversed(replies)] == [2, 1, 0]


def sniffed(address: str, name: bytes, parts: list[bytes]) -> None:
    """Sends a message under any name, with a password that a sniffer stopped; waits for the answer."""
    nonce = secrets.token_hex(8).encode()
    password = LOCK.key.password(nonce)
    with dealing(address, routing_id=name, plain_username=nonce, plain_password=password) as dealer:
        dealer.send_multipart(parts)
        assert dealer.poll(int(1000 * PATIENCE))


def test_a_stranger_gets_nothing_with_an_incarnation_that_it_has_seen() -> None:
    answer = NotesDamage()
    with Serving(PlainData(), answer) as server:
        sniffed(server.address, b"n" * 16, [sealed(encode_request(Pull(MEMBER, 0), 1))])
    assert "made without the connection's key" in answer.damage[0]


@pytest.mark.parametrize(
    "answer", [b"", bytes(24), bytes(99), None], ids=["empty", "zeros", "longer", "none"]
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_process_on_a_dead_shards_port_receives_no_data(answer: bytes | None, apart: bool) -> None:
    port = free_port()
    seconds = PATIENCE if answer is not None else 0.5
    says = "is not the shard's any more" if answer is not None else "did not prove within 0.5 s that it is"
    with zmq_thief([port], answer) as heard, pytest.raises(ServerUnreachable, match=says):
        PlainData(apart=apart).dial(f"tcp://127.0.0.1:{port}", seconds)
    assert heard == [[QUESTION]]


def test_a_process_on_a_dead_shards_port_cannot_fill_a_workers_memory() -> None:
    def send_a_part_with_more_to_come(line: socket.socket) -> None:
        line.sendall(b"\x03" + PART_BYTES.to_bytes(8) + bytes(PART_BYTES))
        while line.recv(1000):
            pass

    with (
        impostor(send_a_part_with_more_to_come) as (address, heard),
        pytest.raises(ServerUnreachable, match="is not the shard's any more"),
    ):
        PlainData().dial(address, 3600.0)
    assert len(heard) == 1


def test_a_connection_that_is_lost_before_the_proof_is_made_again() -> None:
    with (
        impostor(read_frame) as (address, heard),
        pytest.raises(ServerUnreachable, match=r"connection lost .* before the shard's proof"),
    ):
        PlainData().dial(address, PATIENCE)
    assert len(heard) == len(set(heard)) == ATTEMPTS, "each attempt has a password of its own"


@pytest.mark.parametrize("messages", [[], [[b"proof"], [b"proof"]], [[b"proof", b"payload"]]])
def test_a_proof_is_one_message(messages: list[list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    shard = KeyedSeal(LOCK.key.data_key, b"n" * 16, serves=True, numbers=count())
    worker = KeyedSeal(LOCK.key.data_key, b"n" * 16, serves=False, numbers=count())
    proof = shard.seal(Message(b""))
    came = [[zmq.Frame(proof if part == b"proof" else part) for part in parts] for parts in messages]
    monkeypatch.setattr(transport, "receive", lambda dealer: iter(came))
    lane = transport._Lane(Sockets(), "tcp://127.0.0.1:1", b"n" * 16, LOCK.key)
    with contextlib.closing(lane):
        assert not lane._has_proof(worker)
        came[:] = [[zmq.Frame(proof)]]
        assert lane._has_proof(worker)


def test_a_password_that_was_seen_opens_no_connection() -> None:
    plain, recorder = PlainData(), Recorder()
    with Serving(plain) as server:
        port = int(server.address.rpartition(":")[2])
        with server.behind(lambda port: Relay(port, recorder)), server.line() as member:
            assert number_of(ask(member, request(1))) == 1
            with socket.create_connection(("127.0.0.1", port), PATIENCE) as sniffer:
                hello = recorder.seen.index(b"HELLO") - 3
                sniffer.sendall(recorder.seen[: hello + 2 + recorder.seen[hello + 1]])
                answer = bytearray()
                while data := sniffer.recv(1000):
                    answer += data
    assert answer.endswith(b"RROR\x03400"), "libzmq misspells ERROR"
    assert b"WELCOME" not in answer
    assert plain._rejections.counts() == {"token": 1}


def test_an_old_request_is_refused_however_many_names_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.transport.zmq.listener.MAX_REPLY_ROUTES", 3)
    answer, name = NotesDamage(), b"v" * 16
    member = KeyedSeal(LOCK.key.data_key, name, serves=False, numbers=count())
    old = [member.seal(request(1))]
    with Serving(PlainData(), answer) as server:
        sniffed(server.address, name, old)  # as the member does, which leaves then
        for number in range(5):
            sniffed(server.address, b"%16d" % number, [b"x" * 100])
        sniffed(server.address, name, old)
    assert answer.damage[0] == ""
    assert all("without the connection's key" in each for each in answer.damage[1:-1])
    assert "came again" in answer.damage[-1]


def test_a_shard_lets_in_no_more_connections_than_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.transport.zmq.listener.MOST_PASSWORDS", 1)
    plain = PlainData()
    with Serving(plain) as server, server.line() as first:
        with pytest.raises(ServerUnreachable, match="takes no further connection"):
            plain.dial(server.address, PATIENCE)
        assert number_of(ask(first, request(2))) == 2
    assert plain._rejections.counts() == {"token": 1}


@pytest.mark.slow
@pytest.mark.parametrize("toward", ["shard", "worker"])
def test_a_turned_bit_costs_a_new_connection_and_changes_nothing(toward: str) -> None:
    numel, marker = 1000, torch.full((8,), 3.7).numpy().tobytes()
    flip = BitFlip(marker)
    sides = (flip, bytes) if toward == "shard" else (bytes, flip)
    with contextlib.closing(OneShard(BSP(), 1, PlainData(), numel)) as shard:
        shard.behind(lambda port: Relay(port, *sides))
        client = shard.client(0)
        values = begin(client, numel)
        push(client, torch.full((numel,), 3.7), values).wait(SOON)
    assert flip.fired == 1
    assert torch.equal(values, torch.full((numel,), 3.7))
