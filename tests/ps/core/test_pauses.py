from __future__ import annotations

from hubring.ps.core.timing import LATE_WAIT_SECONDS, Pauses
from tests.support.fakes.clock import FakeTime


def test_a_wait_that_ends_much_later_than_its_limit_was_paused() -> None:
    time = FakeTime()
    pauses = Pauses(time)
    for seconds, total in (
        (2.0, 0.0),
        (2.0 + LATE_WAIT_SECONDS, 0.0),
        (12.0, 12.0),
        (1.0, 12.0),
        (30.0, 42.0),
    ):
        with pauses.within(2.0):
            time.advance(seconds)
        assert pauses.seconds == total
    pauses.clear()
    assert pauses.seconds == 0.0
