from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.job.telemetry import SURE_SECONDS, Progress, Standstill, Telemetry


class Heard:
    """What a watch has said."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failed: list[HubringError] = []
        self._watch = Standstill(self.told.append, self.failed.append)

    def look(self, now: float, *operations: str, held: bool = True, waiting: float = 6.0) -> None:
        self._watch.look(
            {
                rank: Progress(
                    heard=now - rank / 2, waiting=waiting, telemetry=Telemetry(operation=what, held=held)
                )
                for rank, what in enumerate(operations)
            },
            now,
        )


def test_all_are_named_once_and_fail_when_none_can_go_on() -> None:
    heard = Heard()
    for second in range(int(SURE_SECONDS)):
        heard.look(10.0 + second, "a step", "a barrier", "a step")
        assert len(heard.told) == 1
        assert not heard.failed
    heard.look(10.0 + SURE_SECONDS, "a step", "a barrier", "a step")
    (error,) = heard.failed
    assert isinstance(error, ConfigError)
    assert "ranks 0, 2 for 6 s in a step; rank 1 for 6 s in a barrier" in str(error)
    assert str(error) == heard.told[0]


def test_what_may_be_on_its_way_is_named_and_does_not_fail() -> None:
    heard = Heard()
    for second in range(100):
        heard.look(10.0 + second, "a step", "a barrier", held=second % 5 > 0)
    assert (len(heard.told), heard.failed) == (1, [])


@pytest.mark.parametrize("operations", [("a step", "a step"), ("a step", ""), ("", "")])
def test_ranks_in_one_operation_or_in_none_go_on(operations: tuple[str, ...]) -> None:
    heard = Heard()
    for second in range(100):
        heard.look(10.0 + second, *operations)
    assert (heard.told, heard.failed) == ([], [])


def test_waits_that_have_no_moment_in_common_do_not_count() -> None:
    heard = Heard()
    heard.look(10.0, "a step", "a barrier", waiting=0.4)
    assert not heard.told


def test_ranks_that_went_on_are_named_again() -> None:
    heard = Heard()
    for what in ("a step", "a barrier", "a step"):
        heard.look(10.0, what, "a barrier")
    assert len(heard.told) == 2


def test_ranks_that_wait_in_the_means_of_the_first_step_read_why() -> None:
    heard = Heard()
    heard.look(10.0, "first gradients 0", "a step")
    assert heard.told[0].endswith(
        "in the same order. In the first step, all ranks must run backward equally often"
    )
