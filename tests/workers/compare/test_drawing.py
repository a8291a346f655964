"""What drawings are made of: scales, marks, bins, courses, panels, and the experiment as TOML."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubring.ps.page.kit.chart import LinearScale, LogScale
from hubring.workers.compare.findings import CurvePoint, RunCurve, Scaling
from hubring.workers.compare.plan.setting import Fault, Link, Setting, without_servers, words
from hubring.workers.compare.show.material import DASHES, KNOWN, SHAPES, marks, panels, unaffected
from hubring.workers.compare.show.page import page
from hubring.workers.compare.show.progress import course
from hubring.workers.compare.show.scaling import overtaking
from hubring.workers.runtime.slowdown import Straggler
from tests.support.compare.replayed import compared
from tests.support.compare.results import full, read
from tests.support.pages.html_tree import html_tree

FINITE = st.floats(-1e9, 1e9, allow_subnormal=False)


@settings(max_examples=40, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=6))
def test_a_linear_scale_holds_its_values_and_has_round_ticks(values: list[float]) -> None:
    scale = LinearScale.around(values)
    assert all(-1e-6 <= scale.place(value) <= 1 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 9
    assert all(low < high for low, high in pairwise(ticks))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=6))
def test_a_log_scale_holds_its_values_and_has_ticks(values: list[float]) -> None:
    scale = LogScale.around(values)
    assert all(-1e-9 <= scale.place(value) <= 1 + 1e-9 for value in values)
    assert 1 < len(scale.ticks()) <= 8


def test_a_scale_of_counts_has_its_ticks_at_them() -> None:
    assert LogScale.of([4, 1, 2, 4]).ticks() == [1, 2, 4]
    assert len(LogScale.of([2**power for power in range(14)]).ticks()) <= 7


def test_known_rows_always_look_the_same_and_no_two_alike_in_anything() -> None:
    found = marks(reversed(KNOWN))
    assert found == marks(KNOWN)
    for part in ("accent", "dash", "outline"):
        assert (
            len({getattr(mark, part) for mark in found.values()}) == len(KNOWN) == len(SHAPES) == len(DASHES)
        )


def test_rows_that_nobody_knows_take_what_is_left_and_then_the_first_again() -> None:
    found = marks(["ring", "mine", "yours"])
    assert len({mark.accent for mark in found.values()}) == 3
    assert found["ring"] == marks(["ring"])["ring"]
    assert len(marks([f"row{index}" for index in range(25)])) == 25


def curve(seed: int, values: list[float], pace: float) -> RunCurve:
    points = [CurvePoint(pace * at, 10.0 * at, value) for at, value in enumerate(values)]
    return RunCurve("n2", "ring", seed, loss=points, metric=points)


def test_a_course_joins_the_readings_that_are_after_the_same_samples() -> None:
    curves = [curve(0, [1, 5, 7], 1.0), curve(1, [2, 4, 9], 2.0), curve(2, [3, 6, 8, 99], 4.0)]
    by_time, by_samples = course(curves, "metric"), course(curves, "loss")
    assert [(spot.x, spot.y, spot.low, spot.high) for spot in by_time] == [
        (0, 2, 1, 3),
        (2, 5, 4, 6),
        (4, 8, 7, 9),
    ]
    assert [spot.x for spot in by_samples] == [0, 10, 20]


def test_rows_that_a_setting_makes_no_difference_to_stand_in_all_its_panels() -> None:
    found = {each.title: [entry.row for entry in each.entries] for each in panels(read(full()))}
    rows = found["4 workers, 4 servers, links of 1 Gbit/s, 0.5 ms of latency"]
    assert rows == ["local", "ring", "hub-bsp", "ddp"]
    assert "4 workers, 1 server" not in found, "its only row stands in the others"


@pytest.mark.parametrize(
    ("row", "changes", "same"),
    [
        ("ring", {"fault": Fault(victim="shard", step=9)}, True),
        ("ring", {"fault": Fault(rank=1, step=9)}, False),
        ("rpc", {"servers": 2}, False),
    ],
)
def test_a_row_is_shown_where_its_runs_are_the_same(row: str, changes: dict[str, Any], same: bool) -> None:
    assert unaffected(row, Setting(workers=2), Setting(workers=2, **changes)) is same


def test_a_row_that_ignores_servers_is_drawn_in_every_panel_with_one_time(tmp_path: Path) -> None:
    results = compared(tmp_path, rows=("ring", "hub-bsp", "hub-colocated"), servers=(1, 2), workers=(2,))
    tree = html_tree(page(read(results)))
    assert "Not drawn" not in tree.text
    section = tree.section("scaling")
    cells = [[cell.text for cell in line.all("*") if cell.tag in ("th", "td")] for line in section.all("tr")]
    assert [line[:2] for line in cells[1:]] == [
        ["ring", "any"],
        ["hub-bsp", "1"],
        ["hub-bsp", "2"],
        ["hub-colocated", "any"],
    ]


@pytest.mark.parametrize(
    ("key", "left"),
    [("n4 k2 1gbit", "n4 1gbit"), ("n4 k16", "n4"), ("n4", "n4"), ("n4 k1 kill1@50", "n4 kill1@50")],
)
def test_a_setting_without_its_servers_keeps_all_else(key: str, left: str) -> None:
    assert without_servers(key) == left


def test_a_setting_is_told_in_words() -> None:
    setting = Setting(
        workers=4,
        servers=1,
        link=Link(rate=2e8, latency=0.005, jitter=0.001),
        straggler=Straggler(kind="host", seconds=0.02, ranks=(2, 3)),
        fault=Fault(rank=1, step=50),
        compute=0.05,
    )
    assert words(setting) == (
        "4 workers, 1 server, links of 200 Mbit/s, 5 ms of latency ± 1 ms, a slow host's mean delay of"
        " 20 ms per step on rank 2, 3, worker 1 killed before step 50, 50 ms of emulated compute per step"
    )


def test_a_hub_overtakes_from_the_size_on_from_which_it_stays_ahead() -> None:
    sizes = [1, 2, 4, 8]
    ring = Scaling("ring", sizes, [None] * 4, [10.0, 18.0, 30.0, 40.0])
    late = Scaling("hub-bsp", sizes, [None] * 4, [12.0, 17.0, 31.0, 50.0])
    never = Scaling("hub-asp", sizes, [None] * 4, [1.0, 2.0, 3.0, 4.0])
    assert overtaking([ring, late, never]) == [("hub-bsp", 4)]
    assert overtaking([late, never]) == []
