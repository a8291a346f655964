"""What a shard does with messages that it cannot use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hubring.protos import data_pb2 as pb
from hubring.ps.core.types import INCARNATION_BYTES
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.base import Connection, Message
from tests.support.transports.one_shard import SOON, OneShard

COUNT = 1000


@contextlib.contextmanager
def talking() -> Iterator[tuple[OneShard, Connection]]:
    """Gives a shard and a connection to it."""
    with (
        contextlib.closing(OneShard(BSP(), 1)) as shard,
        contextlib.closing(shard.transport.dial(shard.address, SOON)) as line,
    ):
        yield shard, line


@pytest.mark.parametrize(
    "header", [b"", pb.Header(request=1, rank=0, incarnation=bytes(24)).SerializeToString()]
)
def test_damaged_messages_of_strangers_fill_no_log_and_are_not_the_jobs(
    header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with talking() as (shard, line):
        for _ in range(COUNT):
            line.send(Message(header, damage="a header of 40 bytes does not match its checksum"))
        shard.until(lambda loop: loop.rejections.counts().get("damage", 0) == COUNT)
        assert shard.ask(lambda loop: loop.service.damaged) == 0
    assert 0 < len(caplog.records) < 20


def test_a_damaged_payload_of_a_member_is_counted_for_its_job(caplog: pytest.LogCaptureFixture) -> None:
    header = pb.Header(request=1, rank=0, incarnation=(1).to_bytes(INCARNATION_BYTES)).SerializeToString()
    with talking() as (shard, line):
        line.send(Message(header, damage="a payload of 16 bytes does not match its checksum"))
        shard.until(lambda loop: loop.service.damaged == 1)
    assert "refused a message of rank 0: a payload of 16 bytes" in caplog.text
    assert shard.loop.rejections.counts() == {}
