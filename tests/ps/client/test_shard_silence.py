from __future__ import annotations

from hubring.ps.client.shard_silence import (
    ANSWER_SECONDS,
    SECONDS,
    SLOWEST_BYTES_PER_SECOND,
    ShardSilence,
    seconds_of,
)


def test_a_shard_that_is_asked_nothing_is_not_silent() -> None:
    assert ShardSilence().left(1e6) is None


def test_silence_counts_from_the_last_answer() -> None:
    silence = ShardSilence()
    silence.sent(10.0)
    silence.sent(11.0)
    assert silence.left(11.0) == SECONDS - 1
    silence.answered(12.0)
    assert silence.left(12.0) == SECONDS
    assert silence.left(99.0) == 0
    silence.answered(100.0)
    assert silence.left(100.0) is None


def test_a_shard_that_was_idle_is_silent_only_after_the_next_request() -> None:
    silence = ShardSilence()
    silence.sent(0.0)
    silence.answered(1.0)
    silence.sent(100.0)
    assert silence.left(100.0) == SECONDS


def test_a_shard_that_is_asked_has_less_time_and_that_of_the_bytes() -> None:
    silence = ShardSilence()
    silence.sent(0.0)
    silence.ask(SECONDS, 3 * SLOWEST_BYTES_PER_SECOND)
    assert silence.asked
    assert silence.left(SECONDS) == ANSWER_SECONDS + 3.0


def test_whatever_comes_from_a_shard_ends_its_silence() -> None:
    silence = ShardSilence()
    silence.sent(0.0)
    silence.ask(SECONDS, 0)
    silence.heard(SECONDS + 0.5)
    assert not silence.asked
    assert silence.left(SECONDS + 0.5) == SECONDS


def test_a_silent_shard_is_asked_when_a_request_is_late() -> None:
    silence = ShardSilence()
    silence.sent(0.0)
    silence.await_late(SECONDS + 1.0)
    assert silence.left(SECONDS) == 1.0


def test_a_long_message_has_more_time() -> None:
    assert seconds_of(0) == 0.0
    assert seconds_of(3 * SLOWEST_BYTES_PER_SECOND) == 3.0
