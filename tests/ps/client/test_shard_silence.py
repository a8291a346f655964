from __future__ import annotations

from hubring.ps.client.shard_silence import SECONDS, SLOWEST_BYTES_PER_SECOND, ShardSilence, late


def test_a_shard_that_is_asked_nothing_is_not_silent() -> None:
    silence = ShardSilence()
    assert silence.left(1e6) is None
    assert not silence.over(1e6)


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


def test_a_silent_shard_is_asked_again_and_again() -> None:
    silence = ShardSilence()
    silence.sent(0.0)
    assert not silence.over(SECONDS - 0.1)
    assert silence.over(SECONDS)
    assert not silence.over(SECONDS + 0.1)
    assert silence.over(2 * SECONDS)


def test_a_long_message_has_more_time() -> None:
    assert late(0.0, 0, SECONDS)
    assert not late(0.0, 3 * SLOWEST_BYTES_PER_SECOND, SECONDS + 2.9)
    assert late(0.0, 3 * SLOWEST_BYTES_PER_SECOND, SECONDS + 3)
