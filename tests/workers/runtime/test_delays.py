"""How long a step is made to take."""

from __future__ import annotations

import math
import subprocess
import sys
from statistics import mean

import pytest

from hubring.ps.core.errors import UsageError
from hubring.workers.runtime.slowdown import SlowdownSettings, StragglerKind
from tests.support.training.delays import delays

STEPS = 20_000
KINDS: list[StragglerKind] = ["constant", "pareto", "host"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_straggler_is_as_slow_on_average_as_it_was_told(kind: StragglerKind) -> None:
    deviation = 3.0  # of one step, in means: the host's; of a Lomax variable with shape 2.5 it is 2.24
    assert mean(delays(kind, steps=STEPS)) == pytest.approx(0.02, rel=4 * deviation / math.sqrt(STEPS))


def test_of_pareto_most_steps_are_short_and_few_take_long() -> None:
    drawn = sorted(delays("pareto", steps=STEPS))
    assert drawn[0] >= 0
    assert drawn[STEPS // 2] < 0.01  # the median is 0.0096
    assert drawn[-1] > 0.2


def test_ranks_of_one_host_are_slow_in_the_same_steps_a_tenth_of_them() -> None:
    one, other = delays("host", rank=1, ranks=(1, 2)), delays("host", rank=2, ranks=(1, 2))
    assert one == other
    assert sorted(set(one)) == pytest.approx([0.0, 0.2])
    assert delays("host", rank=1, ranks=(1, 2), seed=1) != one


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_no_straggler_has_no_delay(kind: StragglerKind) -> None:
    assert set(delays(kind, rank=0, ranks=(1,))) == {0.0}
    assert any(delays(kind, rank=1, ranks=(1,)))


@pytest.mark.slow
def test_another_process_draws_the_same() -> None:
    program = """
from tests.support.training.delays import delays
print(*(number.hex() for kind in ("pareto", "host") for number in delays(kind, rank=1, seed=7)))
"""
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    own = [number for kind in KINDS[1:] for number in delays(kind, rank=1, seed=7)]
    assert [float.fromhex(word) for word in said.split()] == own


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_no_step_computes_for_less_than_no_time(seconds: float) -> None:
    with pytest.raises(UsageError, match="compute"):
        SlowdownSettings(compute=seconds)
