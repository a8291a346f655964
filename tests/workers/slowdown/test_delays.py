"""How long a step is made to take."""

from __future__ import annotations

import math
import subprocess
import sys
from statistics import mean

import msgspec
import pytest

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.slowdown.delays import Delays, Slowness
from hubring.workers.slowdown.straggler import Kind, Straggler
from tests.support.training.delays import delays

STEPS = 20_000
KINDS: list[Kind] = ["constant", "pareto", "host"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_straggler_is_as_slow_on_average_as_it_was_told(kind: Kind) -> None:
    deviation = 3.0  # of one step, in means: the host's; of a Lomax variable with shape 2.5 it is 2.24
    assert mean(delays(kind, steps=STEPS)) == pytest.approx(0.02, rel=4 * deviation / math.sqrt(STEPS))


def test_of_pareto_most_steps_are_short_and_few_take_long() -> None:
    drawn = sorted(delays("pareto", steps=STEPS))
    assert drawn[0] >= 0
    assert drawn[STEPS // 2] < 0.01  # the median is 0.0096
    assert drawn[-1] > 0.2


def test_a_constant_straggler_is_slow_in_every_step() -> None:
    assert set(delays("constant")) == {0.02}


def test_ranks_of_one_host_are_slow_in_the_same_steps_a_tenth_of_them() -> None:
    one, other = delays("host", rank=1, ranks=(1, 2)), delays("host", rank=2, ranks=(1, 2))
    assert one == other
    assert sorted(set(one)) == pytest.approx([0.0, 0.2])
    assert delays("host", rank=1, ranks=(1, 2), seed=1) != one


def test_ranks_draw_their_own_tails() -> None:
    assert delays("pareto", rank=1) != delays("pareto", rank=2)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_no_straggler_loses_nothing(kind: Kind) -> None:
    assert set(delays(kind, rank=0, ranks=(1,))) == {0.0}
    assert any(delays(kind, rank=1, ranks=(1,)))


def test_what_is_computed_elsewhere_takes_its_time_on_every_rank_beside_who_is_late() -> None:
    straggler = Straggler(kind="constant", seconds=0.5, ranks=(1,))
    made = [Delays(straggler, 0.25, 0, rank) for rank in range(3)]
    assert [each.compute for each in made] == [0.25, 0.25, 0.25]
    assert [each.lateness(3) for each in made] == [0.0, 0.5, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_process_draws_the_same(kind: Kind) -> None:
    program = f"""
from tests.support.training.delays import delays
print(*map(float.hex, delays({kind!r}, rank=1, seed=7)))
"""
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert [float.fromhex(word) for word in said.split()] == delays(kind, rank=1, seed=7)


def test_what_workers_are_told_is_the_same_after_json() -> None:
    straggler = Straggler(kind="host", seconds=0.1, ranks=(1, 2))
    setting = Setting(workers=4, straggler=straggler, compute=0.05)
    told = Slowness(setting.straggler, setting.compute, seed=3)
    assert msgspec.json.decode(msgspec.json.encode(told), type=Slowness) == told
    assert msgspec.convert({}, Slowness) == Slowness()


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_no_step_computes_for_less_than_no_time(seconds: float) -> None:
    with pytest.raises(UsageError, match="compute"):
        Slowness(compute=seconds)
