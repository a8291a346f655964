"""What a shard does with messages that it cannot use."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from hubring.protos import data_pb2 as pb
from hubring.ps.core.types import INCARNATION_BYTES
from hubring.ps.store.consistency import BSP
from hubring.ps.transport.base import Envelope, Message
from tests.support.transports.one_shard import OneShard, started

COUNT = 1000
start = pytest.fixture(started, name="start")


def come(shard: OneShard, header: bytes, damage: str) -> None:
    """A damaged message comes to a listener."""
    envelope = Envelope(Message(header, damage=damage), "from nowhere")
    shard.tell(lambda: shard.loop._serve(Mock(), envelope, 0))


@pytest.mark.parametrize(
    "header", [b"", pb.Header(request=1, rank=0, incarnation=bytes(24)).SerializeToString()]
)
def test_damaged_messages_of_strangers_fill_no_log_and_are_not_the_jobs(
    start: Callable[..., OneShard], header: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    shard = start(BSP(), 1)
    for _ in range(COUNT):
        come(shard, header, "a header of 40 bytes does not match its checksum")
    assert shard.loop.rejections.counts() == {"damage": COUNT}
    assert shard.loop.service.damaged == 0
    assert 0 < len(caplog.records) < 20


def test_a_damaged_payload_of_a_member_is_counted_for_its_job(
    start: Callable[..., OneShard], caplog: pytest.LogCaptureFixture
) -> None:
    shard = start(BSP(), 1)
    header = pb.Header(request=1, rank=0, incarnation=(1).to_bytes(INCARNATION_BYTES)).SerializeToString()
    come(shard, header, "a payload of 16 bytes does not match its checksum")
    assert shard.loop.service.damaged == 1
    assert "refused a message of rank 0: a payload of 16 bytes" in caplog.text
    assert shard.loop.rejections.counts() == {}


def test_an_answer_to_a_stranger_is_held_back_from_no_member(start: Callable[..., OneShard]) -> None:
    shard, waits = start(BSP(), 1), Mock()
    shard.tell(lambda: setattr(shard.loop, "send", waits))  # for the standby
    come(shard, pb.Header(request=1).SerializeToString(), "")
    shard.tell(lambda: shard.loop._send_now(*waits.call_args.args))
    assert not shard.loop.service.held
