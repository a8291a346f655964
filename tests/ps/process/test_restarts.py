"""Restarts: after what, how many, and how long each waits."""

from __future__ import annotations

import signal

import pytest

from hubring.ps.process.restarts import LONGEST_PAUSE_SECONDS, Restarts, helps, wait


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((69, 75, 128 + signal.SIGKILL, 128 + signal.SIGSEGV, 128 + signal.SIGTERM), True),
        ((0, 1, 2, 64, 74, 78, 128 + signal.SIGINT, 128 + signal.SIGPIPE), False),
    ],
)
def test_only_a_loss_is_helped(codes: tuple[int, ...], expected: bool) -> None:
    assert [helps(code) for code in codes] == [expected] * len(codes)


def test_each_restart_without_progress_waits_twice_as_long() -> None:
    restarts = Restarts(7)
    assert [restarts.next_pause() for _ in range(7)] == [1, 2, 4, 8, 16, LONGEST_PAUSE_SECONDS, 30]
    assert (restarts.left, restarts.total) == (0, 7)


def test_progress_allows_all_restarts_again() -> None:
    restarts = Restarts(2, first_pause=5.0)
    pauses = [restarts.next_pause(), restarts.next_pause()]
    restarts.note_progress()
    assert restarts.left == 2
    assert [*pauses, restarts.next_pause()] == [5, 10, 5]
    assert (restarts.left, restarts.total) == (1, 3)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)]
)
def test_a_signal_ends_the_wait(number: int, code: int) -> None:
    assert wait(1000.0, [number]) == code
    assert wait(0.0, []) == 0
