"""A shard process from its first moment."""

from __future__ import annotations

import signal

import pytest

from hubring.ps.process.launch import STOP_SIGNALS
from hubring.ps.shard.process import STOPPED
from hubring.ps.shard.spawn import ShardSettings, start

LIMIT = 60.0


@pytest.mark.slow
def test_a_shard_that_still_starts_ignores_what_its_group_is_sent() -> None:
    shard = start("a shard process", ShardSettings("127.0.0.1:1"))
    for number in STOP_SIGNALS:
        shard.signal(number)
    shard.ask_to_stop()
    assert shard.wait(LIMIT)
    assert shard.code == STOPPED
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)
