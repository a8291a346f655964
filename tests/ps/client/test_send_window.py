from __future__ import annotations

from hubring.ps.client.requests import BYTES, PATIENCE_SECONDS, SendWindow

SMALL, LARGE = BYTES // 4, BYTES


def window_of(count: int, nbytes: int) -> SendWindow[int]:
    window = SendWindow[int](bounded=True)
    for number in range(count):
        window.put(number, 0, nbytes)
    return window


def taken(window: SendWindow[int], now: float) -> list[int]:
    found = []
    while (item := window.take(now)) is not None:
        found.append(item)
    return found


def test_a_small_one_among_large_ones_does_not_stop_them() -> None:
    window = window_of(4, LARGE)
    window.put(4, 0, 1024)
    window.put(5, 0, LARGE)
    assert taken(window, 0.0) == [0, 1, 2]
    window.answered(LARGE, 0.01)
    assert taken(window, 0.01) == [3]
    window.answered(LARGE, 0.02)
    assert taken(window, 0.02) == [4, 5]


def test_the_bound_doubles_while_no_answer_comes_and_is_back_with_the_first() -> None:
    window = window_of(20, SMALL)
    assert len(taken(window, 0.0)) == 4
    assert window.patience(0.25 * PATIENCE_SECONDS) == 0.75 * PATIENCE_SECONDS
    assert taken(window, 0.99 * PATIENCE_SECONDS) == []
    assert len(taken(window, 1.01 * PATIENCE_SECONDS)) == 4
    assert len(taken(window, 2.01 * PATIENCE_SECONDS)) == 8
    window.answered(SMALL, 2.02 * PATIENCE_SECONDS)
    assert taken(window, 2.03 * PATIENCE_SECONDS) == []


def test_clearing_takes_out_what_waits_in_its_order() -> None:
    window = window_of(6, SMALL)
    taken(window, 0.0)
    window.put(99, 1, SMALL)
    assert window.clear() == [99, 4, 5]
    assert not window.waiting
