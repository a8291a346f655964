"""The simulation: it agrees with the formulas where they hold, and keeps its laws where they do not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.workers.compare.plan.row import Row, Rule
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.predict.exchange_terms import HubExchange, TransferSeconds
from hubring.workers.compare.predict.simulation import Draws, SimulationInput, simulate
from hubring.workers.runtime.slowdown import Straggler, StragglerKind

NOTHING = HubExchange()
WAY = HubExchange(
    own_by=TransferSeconds(link=0.01),
    shared_by=TransferSeconds(link=0.004),
    serve=0.0005,
    close=0.001,
    slices=10,
    latency=0.0001,
)
HEAVY = Straggler(kind="pareto", seconds=0.02)

seconds = st.floats(0.0, 0.1)
ways = st.builds(
    lambda shared, more, serve, close, slices, latency: HubExchange(
        own_by=TransferSeconds(link=shared + more),
        shared_by=TransferSeconds(link=shared),
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


def scene(
    rule: Rule,
    workers: int = 8,
    straggler: Straggler | None = None,
    staleness: int = 0,
    backup: int = 0,
    **more: Any,
) -> SimulationInput:
    row = Row(name="", about="", rule=rule, staleness=staleness, backup=backup)
    setting = Setting(workers=workers, straggler=straggler)
    return SimulationInput(row=row, setting=setting, **{"way": WAY, "compute": 0.1, "steps": 50, **more})


@given(way=ways, workers=st.integers(1, 40), compute=st.floats(0.001, 0.2))
@settings(max_examples=30, deadline=None)
def test_alike_workers_in_lockstep_take_what_the_formula_says(
    way: HubExchange, workers: int, compute: float
) -> None:
    for rule in ("bsp", "backup"):
        course = simulate(scene(rule=rule, workers=workers, way=way, compute=compute, steps=5))
        assert course.step_seconds == pytest.approx(compute + way.lockstep(workers))
    course = simulate(scene(rule="ring", workers=workers, way=way, compute=compute, steps=5))
    assert course.step_seconds == pytest.approx(compute + way.alone)


@given(way=ways, workers=st.integers(1, 40), compute=st.floats(0.001, 0.2))
@settings(max_examples=12, deadline=None)
def test_alike_workers_without_lockstep_reach_the_larger_bound(
    way: HubExchange, workers: int, compute: float
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
    assert course.exchanges / course.seconds == pytest.approx(7 / 0.1 + 1 / 1.0, rel=0.01)


@pytest.mark.parametrize("rule", ["bsp", "ring"])
def test_lockstep_takes_as_long_as_its_slowest(rule: Rule) -> None:
    draws, everyone = Draws(HEAVY, 8, 3), np.arange(8)
    slowest = [0.1 + draws.take(everyone, np.full(8, step)).max() for step in range(50)]
    course = simulate(scene(rule=rule, way=NOTHING, straggler=HEAVY, seed=3))
    assert course.seconds == pytest.approx(sum(slowest))
    assert course.step_seconds == pytest.approx(float(np.median(slowest)))


def test_a_backup_worker_hides_one_slow_worker() -> None:
    slow = Straggler(kind="constant", seconds=0.35, ranks=(5,))
    bsp = simulate(scene(rule="bsp", straggler=slow))
    backup = simulate(scene(rule="backup", backup=1, straggler=slow))
    assert bsp.step_seconds == pytest.approx(0.1 + 0.35 + WAY.own, rel=0.15)
    assert backup.step_seconds == pytest.approx(0.1 + WAY.lockstep(7), rel=0.05)


@pytest.mark.parametrize("rule", ["bsp", "backup", "ssp", "asp"])
def test_more_servers_are_not_slower(rule: Rule) -> None:
    ways = [replace(WAY, shared_by=TransferSeconds(link=0.02 / k)) for k in (1, 2, 4, 8)]
    slow = scene(rule=rule, backup=1, staleness=2, straggler=HEAVY)
    times = [simulate(replace(slow, way=way)).seconds for way in ways]
    # Without lockstep other gradients arrive in between, which moves the end by less than a step.
    assert all(more <= 1.001 * fewer for fewer, more in pairwise(times))


@pytest.mark.parametrize("kind", ["constant", "pareto", "host"])
def test_draws_have_the_mean_that_was_asked_for(kind: StragglerKind) -> None:
    draws = Draws(Straggler(kind=kind, seconds=0.02, ranks=(1,), shape=3.0), 4, 0)
    rows = np.array([draws.take(np.arange(4), np.full(4, step)) for step in range(4000)])
    assert rows[:, [0, 2, 3]].max() == 0
    assert rows[:, 1].mean() == pytest.approx(0.02, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["backup", "ssp"])
def test_ten_thousand_workers_finish(rule: Rule) -> None:
    way = replace(WAY, shared_by=TransferSeconds(link=0.00001), serve=1e-6, close=1e-6)
    played = scene(rule=rule, workers=10_000, way=way, steps=100, straggler=HEAVY, staleness=3, backup=5)
    assert simulate(played).lead <= 3
