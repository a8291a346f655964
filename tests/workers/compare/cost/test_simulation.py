"""The simulation: it agrees with the formulas where they hold, and keeps its laws where they do not."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.workers.compare.cost.model.exchange_terms import Carriers, Way
from hubring.workers.compare.cost.simulate.draws import Draws
from hubring.workers.compare.cost.simulate.scene import Scene
from hubring.workers.compare.cost.simulate.simulation import simulate
from hubring.workers.compare.cost.simulate.station import Station
from hubring.workers.compare.experiment.setting import Fault
from hubring.workers.slowdown.delays import SLOW_SHARE
from hubring.workers.slowdown.straggler import Straggler

Rule = Literal["ring", "bsp", "backup", "ssp", "asp"]
RULES: tuple[Rule, ...] = ("ring", "bsp", "backup", "ssp", "asp")
NOTHING = Way(shared=0.0, serve=0.0, close=0.0, slices=inf, latency=0.0)
WAY = Way(own_by=Carriers(link=0.01), shared=0.004, serve=0.0005, close=0.001, slices=10, latency=0.0001)
HEAVY = Straggler(kind="pareto", seconds=0.02)

seconds = st.floats(0.0, 0.1)
ways = st.builds(
    lambda shared, more, serve, close, slices, latency: Way(
        own_by=Carriers(link=shared + more),
        shared=shared,
        serve=serve,
        close=close,
        slices=slices,
        latency=latency,
    ),
    *(seconds, seconds, seconds, seconds),
    st.integers(1, 50),
    seconds,
)
stragglers = st.builds(
    Straggler,
    kind=st.sampled_from(["constant", "pareto", "host"]),
    seconds=st.floats(0.001, 0.5),
    ranks=st.sampled_from([(), (0,), (0, 1)]),
    shape=st.floats(1.1, 4.0),
)


def scene(**more: Any) -> Scene:
    return Scene(**{"workers": 8, "way": WAY, "compute": 0.1, "steps": 50, **more})


@given(way=ways, workers=st.integers(1, 40), compute=st.floats(0.001, 0.2))
@settings(max_examples=30, deadline=None)
def test_alike_workers_in_lockstep_take_what_the_formula_says(way: Way, workers: int, compute: float) -> None:
    for rule in ("bsp", "backup"):
        course = simulate(scene(rule=rule, workers=workers, way=way, compute=compute, steps=5))
        assert course.step_seconds == pytest.approx(compute + way.lockstep(workers))
    course = simulate(scene(rule="ring", workers=workers, way=way, compute=compute, steps=5))
    assert course.step_seconds == pytest.approx(compute + way.alone)


@given(way=ways, workers=st.integers(1, 40), compute=st.floats(0.001, 0.2))
@settings(max_examples=12, deadline=None)
def test_alike_workers_without_lockstep_reach_the_larger_bound(
    way: Way, workers: int, compute: float
) -> None:
    course = simulate(scene(rule="asp", workers=workers, way=way, compute=compute, steps=60))
    bound = max(compute + way.alone, workers * way.bottleneck)
    assert course.step_seconds == pytest.approx(bound, rel=0.02)


@given(straggler=stragglers, staleness=st.integers(0, 5), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_ssp_never_leads_by_more_than_its_staleness(straggler: Straggler, staleness: int, seed: int) -> None:
    course = simulate(scene(rule="ssp", staleness=staleness, straggler=straggler, seed=seed))
    assert course.lead <= staleness


def test_asp_leads_by_more_and_goes_on_at_its_own_pace() -> None:
    slow = Straggler(kind="constant", seconds=0.9, ranks=(0,))
    course = simulate(scene(rule="asp", way=NOTHING, straggler=slow, steps=200))
    assert course.lead > 100
    assert course.step_seconds == pytest.approx(0.1)
    assert course.steps_per_second == pytest.approx(7 / 0.1 + 1 / 1.0, rel=0.01)


@pytest.mark.parametrize("rule", ["bsp", "ring"])
def test_lockstep_takes_as_long_as_its_slowest(rule: Rule) -> None:
    draws, everyone = Draws(HEAVY, 8, 3), np.arange(8)
    slowest = [0.1 + draws.take(everyone, np.full(8, step)).max() for step in range(50)]
    course = simulate(scene(rule=rule, way=NOTHING, straggler=HEAVY, seed=3))
    assert course.seconds == pytest.approx(sum(slowest))
    assert course.step_seconds == pytest.approx(float(np.median(slowest)))


def test_ssp_of_nothing_waits_as_bsp_does() -> None:
    bsp = simulate(scene(rule="bsp", way=NOTHING, straggler=HEAVY, steps=400))
    ssp = simulate(scene(rule="ssp", staleness=0, way=NOTHING, straggler=HEAVY, steps=400))
    assert ssp.lead == 0
    assert ssp.steps_per_second == pytest.approx(bsp.steps_per_second, rel=0.1)


@given(straggler=stragglers)
@settings(max_examples=8, deadline=None)
def test_the_looser_the_rule_the_faster(straggler: Straggler) -> None:
    speeds = [
        simulate(scene(way=NOTHING, straggler=straggler, steps=100, **rule)).steps_per_second
        for rule in (
            {"rule": "ssp", "staleness": 0},
            {"rule": "ssp", "staleness": 3},
            {"rule": "asp"},
        )
    ]
    assert speeds[1] > 0.95 * speeds[0]  # draws fall to other steps, so not exactly
    assert speeds[2] > 0.95 * speeds[1]


def test_a_backup_worker_hides_one_slow_worker() -> None:
    slow = Straggler(kind="constant", seconds=0.35, ranks=(5,))
    bsp = simulate(scene(rule="bsp", straggler=slow))
    backup = simulate(scene(rule="backup", backup=1, straggler=slow))
    assert bsp.step_seconds == pytest.approx(0.1 + 0.35 + WAY.own, rel=0.15)
    assert backup.step_seconds == pytest.approx(0.1 + WAY.lockstep(7), rel=0.05)
    assert backup.dropped > 5


@pytest.mark.parametrize("rule", RULES)
@given(straggler=stragglers, shared=st.floats(0.0001, 0.05))
@settings(max_examples=10, deadline=None)
def test_a_link_carries_all_bytes_and_never_more_than_it_can(
    rule: Rule, straggler: Straggler, shared: float
) -> None:
    way = replace(WAY, own_by=Carriers(link=0.05), shared=0.0 if rule == "ring" else shared)
    course = simulate(scene(rule=rule, way=way, straggler=straggler, staleness=2, backup=1))
    assert course.busy == pytest.approx(course.exchanges * way.shared)
    assert course.busy <= course.seconds * (1 + 1e-9)
    assert course.exchanges >= 8 * 50 or rule == "backup"


@pytest.mark.parametrize("rule", ["bsp", "backup", "ssp", "asp"])
def test_more_servers_are_not_slower(rule: Rule) -> None:
    times = [
        simulate(
            scene(rule=rule, backup=1, staleness=2, straggler=HEAVY, way=replace(WAY, shared=0.02 / k))
        ).seconds
        for k in (1, 2, 4, 8)
    ]
    # Without lockstep other gradients arrive in between, which moves the end by less than a step.
    assert all(more <= 1.001 * fewer for fewer, more in pairwise(times))


@pytest.mark.parametrize("rule", RULES)
def test_the_same_scene_has_the_same_course(rule: Rule) -> None:
    played = scene(rule=rule, straggler=HEAVY, staleness=2, backup=1)
    assert simulate(played) == simulate(played)
    assert simulate(played) != simulate(replace(played, seed=1))


def test_a_ring_ends_with_its_first_loss() -> None:
    course = simulate(scene(rule="ring", fault=Fault(rank=2, step=10)))
    assert not course.finished
    assert course.seconds == pytest.approx(10 * (0.1 + WAY.alone))


@pytest.mark.parametrize("rule", ["bsp", "ssp"])
def test_those_who_wait_for_a_lost_worker_wait_one_lease(rule: Rule) -> None:
    whole = simulate(scene(rule=rule, staleness=2))
    lossy = simulate(scene(rule=rule, staleness=2, fault=Fault(rank=2, step=10), lease=5.0))
    per_step = whole.seconds / 50
    # seven workers take the lost one's steps too where work, not steps, is counted
    assert 4.0 < lossy.seconds - whole.seconds < 5.0 + 10 * per_step
    assert lossy.finished


def test_nobody_waits_for_a_lost_worker_under_asp() -> None:
    whole = simulate(scene(rule="asp"))
    lossy = simulate(scene(rule="asp", fault=Fault(rank=2, step=0)))
    assert lossy.seconds == pytest.approx(whole.seconds * 8 / 7, rel=0.05)


def test_staleness_is_what_others_pushed_meanwhile() -> None:
    course = simulate(scene(rule="asp", steps=200))
    assert course.staleness == pytest.approx(7, rel=0.05)


def test_a_station_serves_in_order_and_one_at_a_time() -> None:
    station = Station(1.0)
    assert station.take(np.array([0.0, 0.2, 5.0])).tolist() == [1.0, 2.0, 6.0]
    assert station.take(np.array([5.5])).tolist() == [7.0]
    assert station.busy == 4.0


@pytest.mark.parametrize("kind", ["constant", "pareto", "host"])
def test_draws_have_the_mean_that_was_asked_for(kind: Literal["constant", "pareto", "host"]) -> None:
    draws = Draws(Straggler(kind=kind, seconds=0.02, ranks=(1,), shape=3.0), 4, 0)
    rows = np.array([draws.take(np.arange(4), np.full(4, step)) for step in range(4000)])
    assert rows[:, [0, 2, 3]].max() == 0
    assert rows[:, 1].mean() == pytest.approx(0.02, rel=0.1)


def test_a_slow_host_is_slow_in_the_same_steps() -> None:
    draws = Draws(Straggler(kind="host", seconds=0.02, ranks=(1, 2)), 4, 0)
    rows = np.array([draws.take(np.arange(4), np.full(4, step)) for step in range(500)])
    assert (rows[:, 1] == rows[:, 2]).all()
    assert (rows[:, 1] > 0).mean() == pytest.approx(SLOW_SHARE, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_ten_thousand_workers_finish(rule: Rule) -> None:
    way = replace(WAY, shared=0.00001, serve=1e-6, close=1e-6)
    played = scene(rule=rule, workers=10_000, way=way, steps=100, straggler=HEAVY, staleness=3, backup=5)
    course = simulate(played)
    assert course.finished
    assert course.lead <= 3 or rule == "asp"
