"""When a standby starts in the place of a process that ended."""

from __future__ import annotations

import pytest

from hubring.ps.process.restarts import LONGEST_PAUSE_SECONDS, YOUNG_SECONDS, Replacements
from tests.support.fakes.clock import FakeTime

WANTED = 4


class Story:
    def __init__(self) -> None:
        self.time = FakeTime()
        self.running = WANTED
        self.missing = Replacements(WANTED, self.start, self.time.now)

    def start(self) -> None:
        self.running += 1

    def end(self, age: float, count: int = 1) -> None:
        for _ in range(count):
            self.running -= 1
            self.missing.note("a standby process was killed", age)

    def pause(self) -> float:
        """Returns how long it takes until nothing is missing."""
        began = self.time.now()
        self.missing.fill(self.running)
        while self.running < WANTED:
            self.time.advance(0.5)
            self.missing.fill(self.running)
        assert self.running == WANTED
        return self.time.now() - began


@pytest.fixture
def story() -> Story:
    return Story()


def test_all_processes_that_ended_are_replaced_at_once(story: Story) -> None:
    story.end(YOUNG_SECONDS, count=3)
    assert story.pause() == 0.0


def test_each_process_that_ends_young_has_a_longer_pause(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    pauses = []
    for _ in range(8):
        story.end(3.0)
        pauses.append(story.pause())
    assert pauses == [0, 1, 2, 4, 8, 16, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "a standby process was killed; starting a standby"
    assert said[3] == "a standby process was killed; starting a standby in 4 s"


def test_the_pause_is_short_again_after_a_process_that_was_steady(story: Story) -> None:
    for _ in range(5):
        story.end(3.0)
        story.pause()
    story.end(YOUNG_SECONDS)
    assert story.pause() == 0.0
    story.end(3.0)
    story.end(3.0)
    assert story.pause() == 1.0


def test_a_takeover_starts_missing_standbys_at_once(story: Story) -> None:
    story.running = 2
    assert story.pause() == 0.0


def test_a_host_without_standbys_replaces_nothing() -> None:
    none = Replacements(0, lambda: pytest.fail("it starts a standby"))
    none.fill(2)
