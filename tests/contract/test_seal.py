"""A peer on the path reads nothing, and changes nothing; one that took a port gets nothing.

On loopback and with `--plain-data` it reads gradients, and no more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from unittest.mock import patch

import pytest
import torch
import zmq

from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.core.messages import Pull, Push
from hubring.ps.core.types import INCARNATION_BYTES, Sender, new_incarnation
from hubring.ps.security.access import ShardKey, ShardLock
from hubring.ps.security.certificate import make_certificate
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.base import Connection, DamagedHeader, Envelope, Listener, Message, sealed
from hubring.ps.transport.decode import decode_request
from hubring.ps.transport.encode import encode_request
from hubring.ps.transport.zmq import transport
from hubring.ps.transport.zmq.keyed_seal import KeyedSeal
from hubring.ps.transport.zmq.socket import FOR_REPLIES, PART_BYTES, QUESTION, Sockets
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

LOCK = ShardLock(identity=make_certificate())
PLAIN = replace(LOCK, plain_data=True)
MEMBER = Sender(3, new_incarnation(7))
CHANGED = "was changed, or made without the connection's key"

both_kinds = pytest.mark.parametrize("lock", [LOCK, PLAIN], ids=["encrypted", "plain"])
both_ways = pytest.mark.parametrize("by_shard", [False, True], ids=["to shard", "to worker"])


class Locked(ZmqTransport):
    """Both ends of ZeroMQ over TCP."""

    def __init__(self, lock: ShardLock = LOCK, *, apart: bool = False) -> None:
        super().__init__(apart=apart, lock=lock)
        self._key = lock.key

    def dial(self, address: str, timeout: float, key: ShardKey | None = None) -> ZmqConnection:
        return super().dial(address, timeout, key or self._key)


def end(lock: ShardLock = LOCK, lane: bytes = b"n" * 16, *, shard: bool = False, first: int = 0) -> KeyedSeal:
    """One end of a lane, which numbers its messages from `first`."""
    return KeyedSeal(lock.key, lane, count(first), serves=shard)


def test_only_shards_with_tls_have_a_key() -> None:
    assert LOCK.key.data_key == PLAIN.key.data_key == bytes.fromhex(LOCK.secret)
    assert ShardLock().key.data_key == LOCK.key.near.data_key == b""
    assert LOCK.secret != ShardLock().secret
    assert [ShardKey.from_proto(lock.key.to_proto()).plain_data for lock in (LOCK, PLAIN)] == [False, True]


@both_kinds
@pytest.mark.parametrize("check", CHECKS)
def test_sealed_messages_pass_the_checks_of_every_transport(
    check: Callable[[MakeTransport], None], lock: ShardLock
) -> None:
    check(partial(Locked, lock))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("check", [check for check in CHECKS if check is not overtakes_only_by_priority])
def test_sealed_messages_pass_the_checks_with_separate_replies(
    check: Callable[[MakeTransport], None],
) -> None:
    check(partial(Locked, apart=True))


@both_kinds
def test_no_part_of_a_message_shows_an_incarnation_and_only_plain_data_gradients(lock: ShardLock) -> None:
    sniffer = Recorder()

    def answer(listener: Listener, envelope: Envelope) -> None:
        _, found = decode_request(envelope.message)
        assert isinstance(found, Push)
        assert found.sender == MEMBER
        listener.send(envelope.reply_to, request(1), stable=True)

    asked = encode_request(Push(MEMBER, 0, 0, torch.full((4,), 3.5), {}), 1)
    with (
        Serving(Locked(lock), answer) as server,
        server.behind(lambda port: Relay(port, sniffer, sniffer)),
        server.line() as line,
    ):
        assert number_of(ask(line, asked)) == 1
    passed = bytes(sniffer.seen)
    assert (torch.full((4,), 3.5).numpy().tobytes() in passed) == lock.plain_data
    assert b"PLAIN" in passed
    assert LOCK.secret.encode() not in passed
    assert LOCK.key.data_key not in passed
    assert MEMBER.incarnation.to_bytes(INCARNATION_BYTES) not in passed
    assert MEMBER.incarnation.to_bytes(24)[8:] not in passed


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


# Each makes another message of the first part and payload of one message, and those of the next one.
FORGERIES: dict[str, Callable[[bytes, bytes, bytes, bytes], list[bytes]]] = {
    "bit in the number": lambda first, payload, *_: [flipped(first, 7), payload],
    "bit in the header": lambda first, payload, *_: [flipped(first, 8), payload],
    "bit in the payload": lambda first, payload, *_: [first, flipped(payload, 50)],
    "payload cut short": lambda first, payload, *_: [first, payload[:-1]],
    "no payload": lambda first, *_: [first],
    "parts exchanged": lambda first, payload, *_: [first, payload[50:], payload[:50]],
    "first part in two": lambda first, payload, *_: [first[:-1], first[-1:] + payload],
    "payload of the next message": lambda first, _, __, later: [first, later],
    "number of the next message": lambda first, payload, later, _: [later[:8] + first[8:], payload],
    "header in the payload": lambda first, payload, *_: [first[:8] + first[9:], payload + first[8:9]],
    "payload in the header": lambda first, payload, *_: [first[:8] + payload[-1:] + first[8:], payload[:-1]],
}


@both_kinds
@both_ways
@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_message_that_the_other_end_did_not_send_is_refused(
    forge: Callable[..., list[bytes]], lock: ShardLock, by_shard: bool
) -> None:
    sender, receiver = end(lock, shard=by_shard), end(lock, shard=not by_shard)
    sent = [bytes(part or b"") for seed in range(2) for part in sender.seal(request(1, noise(100, seed)))]
    for forged, refused in ((forge(*sent), True), (sent[:2], False)):
        with pytest.raises(DamagedHeader, match=CHANGED) if refused else contextlib.nullcontext():
            receiver.open(forged[0], [memoryview(bytearray(part)) for part in forged[1:]])


def test_a_message_without_a_payload_is_not_one_with_an_empty_one() -> None:
    for payload, parts in ((None, [memoryview(b"")]), (memoryview(b""), [])):
        with pytest.raises(DamagedHeader, match=CHANGED):
            end(shard=True).open(end().seal(request(1, payload))[0], parts)


def test_a_first_part_of_any_length_is_refused() -> None:
    for nbytes in range(100):
        with pytest.raises(DamagedHeader):
            end(shard=True).open(bytes(nbytes), [])


@both_kinds
@both_ways
def test_a_message_counts_once_and_only_where_it_was_sent(lock: ShardLock, by_shard: bool) -> None:
    sender, receiver = end(lock, shard=by_shard), end(lock, shard=not by_shard)
    early, late = sender.seal(request(1))[0], sender.seal(request(2))[0]
    for other in (
        end(lock, shard=by_shard),  # which sent it
        end(lock, b"o" * 16, shard=not by_shard),
        end(replace(lock, secret="00" * 32), shard=not by_shard),
        end(replace(lock, plain_data=not lock.plain_data), shard=not by_shard),
    ):
        with pytest.raises(DamagedHeader, match=CHANGED):
            other.open(early, [])
    assert number_of(receiver.open(late, [])) == 2
    for again in (early, late):
        with pytest.raises(DamagedHeader, match="came again, after message 1"):
            receiver.open(again, [])


@both_kinds
def test_each_message_has_its_own_key_and_the_last_number_has_no_next(lock: ShardLock) -> None:
    same, seen = request(1), set[bytes]()
    for start in (0, 2**32 - 1, 2**64 - 2):
        sender, receiver = end(lock, first=start), end(lock, shard=True)
        for _ in range(2):
            first, _ = sender.seal(same)
            seen.add(first[8:])
            assert receiver.open(first, []) == same
    assert len(seen) == 6
    with pytest.raises(OverflowError):
        sender.seal(same)


def sniffed(address: str, name: bytes, *messages: list[bytes]) -> list[bytes]:
    """Sends messages under any name, with a password that a sniffer stopped; returns the first answer."""
    nonce = secrets.token_hex(8).encode()
    password = LOCK.key.password(nonce)
    with dealing(address, routing_id=name, plain_username=nonce, plain_password=password) as dealer:
        for parts in messages:
            dealer.send_multipart(parts)
        assert dealer.poll(int(1000 * PATIENCE))
        return dealer.recv_multipart()


def test_a_shard_counts_on_for_a_name_that_came_before() -> None:
    with Serving(Locked()) as server:
        firsts = [sniffed(server.address, b"n" * 16, parts)[0] for parts in ([QUESTION], [b"x"], [QUESTION])]
    assert [int.from_bytes(first[:8]) for first in firsts] == [0, 1, 2]


def names(line: Connection) -> list[bytes]:
    """What a peer on the path sees of a connection's lanes."""
    assert isinstance(line, ZmqConnection)
    return [bytes(lane.dealer.getsockopt(zmq.ROUTING_ID)) for lane in line._lanes]


def test_each_lane_has_another_name() -> None:
    with Serving(Locked(apart=True)) as server, server.line() as one, server.line() as other:
        assert len({*names(one), *names(other)}) == 4


def test_a_stranger_cannot_direct_a_workers_replies_elsewhere() -> None:
    with Serving(Locked()) as server, server.line() as line:
        sniffed(server.address, names(line)[0] + FOR_REPLIES, [b""], [QUESTION])
        assert number_of(ask(line, request(1))) == 1


@pytest.mark.slow
def test_a_forked_process_sends_nothing_under_the_numbers_that_it_copied() -> None:
    asked: list[int] = []

    def answer(listener: Listener, envelope: Envelope) -> None:
        asked.append(number_of(envelope.message))
        listener.send(envelope.reply_to, envelope.message, stable=True)

    ready, write = os.pipe()
    with Serving(Locked(), answer) as server, server.line() as line:
        ask(line, request(1))
        child = os.fork()
        if child == 0:
            with patch.object(transport, "has_message", lambda _: os.write(write, b"sent")):
                line.send(request(2))
                line.flush()
                os._exit(0)
        select.select([ready], [], [], 1.0)  # ZeroMQ may also wait for ever in a fork
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert number_of(ask(line, request(3))) == 3
    assert asked == [1, 3]


def test_a_stranger_gets_nothing_with_an_incarnation_that_it_has_seen() -> None:
    answer = NotesDamage()
    with Serving(Locked(), answer) as server:
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
        Locked(apart=apart).dial(f"tcp://127.0.0.1:{port}", seconds)
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
        Locked().dial(address, 3600.0)
    assert len(heard) == 1


def test_a_connection_that_is_lost_before_the_proof_is_made_again() -> None:
    with (
        impostor(read_frame) as (address, heard),
        pytest.raises(ServerUnreachable, match=r"connection lost .* before the shard's proof"),
    ):
        Locked().dial(address, PATIENCE)
    assert len(heard) == len(set(heard)) == ATTEMPTS, "each attempt has a password of its own"


@pytest.mark.parametrize("messages", [[], [[b"proof"], [b"proof"]], [[b"proof", b"payload"]]])
def test_a_proof_is_one_message(messages: list[list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    proof, _ = end(shard=True).seal(Message(b""))
    came = [[zmq.Frame(proof if part == b"proof" else part) for part in parts] for parts in messages]
    monkeypatch.setattr(transport, "receive", lambda dealer: iter(came))
    lane = transport._Lane(Sockets(), "tcp://127.0.0.1:1", b"n" * 16, LOCK.key)
    with contextlib.closing(lane):
        assert not lane._has_proof()
        came[:] = [[zmq.Frame(proof)]]
        assert lane._has_proof()


def test_a_password_that_was_seen_opens_no_connection() -> None:
    locked, recorder = Locked(), Recorder()
    with Serving(locked) as server:
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
    assert locked._rejections.counts() == {"token": 1}


def test_an_old_request_is_refused_however_many_names_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.transport.zmq.listener.MAX_REPLY_ROUTES", 3)
    answer, name = NotesDamage(), b"v" * 16
    old = [end(lane=name).seal(request(1))[0]]
    with Serving(Locked(), answer) as server:
        sniffed(server.address, name, old)  # as the member does, which leaves then
        for number in range(5):
            sniffed(server.address, b"%16d" % number, [b"x" * 100])
        sniffed(server.address, name, old)
    assert answer.damage[0] == ""
    assert all("without the connection's key" in each for each in answer.damage[1:-1])
    assert "came again" in answer.damage[-1]


def test_a_shard_lets_in_no_more_connections_than_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.transport.zmq.listener.MOST_PASSWORDS", 1)
    locked = Locked()
    with Serving(locked) as server, server.line() as first:
        with pytest.raises(ServerUnreachable, match="takes no further connection"):
            locked.dial(server.address, PATIENCE)
        assert number_of(ask(first, request(2))) == 2
    assert locked._rejections.counts() == {"token": 1}


@pytest.mark.slow
@pytest.mark.parametrize("toward", ["shard", "worker"])
def test_a_turned_bit_costs_a_new_connection_and_changes_nothing(toward: str) -> None:
    numel, marker = 1000, torch.full((8,), 3.7).numpy().tobytes()
    flip = BitFlip(marker)
    sides = (flip, bytes) if toward == "shard" else (bytes, flip)
    with contextlib.closing(OneShard(BSP(), 1, Locked(PLAIN), numel)) as shard:
        shard.behind(lambda port: Relay(port, *sides))
        client = shard.client(0)
        values = begin(client, numel)
        push(client, torch.full((numel,), 3.7), values).wait(SOON)
    assert flip.fired == 1
    assert torch.equal(values, torch.full((numel,), 3.7))
