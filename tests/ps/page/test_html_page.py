"""The page says what the hub says and nothing else, to everybody, and needs nothing from anywhere."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from hubring.ps.observe.logs import LogEntry
from hubring.ps.page.kit.chart import bins
from hubring.ps.page.kit.figures import number
from hubring.ps.page.picture import ARC, RIM, SIDE, SIGNS, on_arc, shard_boxes, worker_radius
from hubring.ps.page.renderer import SECTIONS, Rendering, answer_page, html_page
from hubring.ps.page.sections import MarkupCache, Section, alarms, changes, curve, headline
from hubring.ps.page.snapshot import Rates, Snapshot
from hubring.ps.page.status_reader import ProgressSample
from tests.support.pages.html_tree import Node, html_tree
from tests.support.pages.status_hub import report, shard, snapshot, worker

LOG = (LogEntry(1, 1.7e9, "info", "rank 0 joined"), LogEntry(2, 1.7e9, "error", "the job cannot go on: x"))
ALL_STATES: dict[str, Any] = {
    "workers": [worker(0), worker(1, seconds_waiting=4.0), worker(2, seconds_since_heartbeat=3.0)],
    "world_size": 8,
    "ended": {"finished": [3], "preempted": [4], "failed": {"5": "out of memory"}, "lost": {"6": "silent"}},
    "slowest": "rank 0 (node1 pid 1000) at step 40",
}


def sections(seen: Snapshot) -> dict[str, Section]:
    return {name: make(seen, MarkupCache()) for name, make in SECTIONS.items()}


def tree(seen: Snapshot, **view: bool) -> Node:
    return html_tree(html_page(Rendering(seen, sections(seen)), **view))


def by_id(node: Node, name: str) -> Node:
    (found,) = [each for each in node.all("*") if each.attributes.get("id") == name]
    return found


SCENES: Mapping[str, Snapshot] = {
    "training": snapshot(shard(0), shard(1), log=LOG),
    "every state": snapshot(shard(0), **ALL_STATES),
    "no job": snapshot(
        count=0, job="", state="waiting for the first worker", started=False, world_size=0, step=0
    ),
    "ring": snapshot(shard(0, keys=0), topology="ring"),
    "failed": snapshot(
        shard(0, error="shard 0 does not answer"), failure="shard 0 is gone", state="failed: x"
    ),
    "many": snapshot(*(shard(index) for index in range(9)), count=64),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_page_asks_for_nothing_elsewhere_and_runs_nothing_of_its_own(scene: str) -> None:
    for node in tree(SCENES[scene]).all("*"):
        names = [name for name in ("src", "href", "action", "formaction") if name in node.attributes]
        assert all(re.match(r"/(?!/)|#", node.attributes[name]) for name in names), node
        assert "style" not in node.attributes, "the policy lets no style in that is not in the file"
        assert not any(name.startswith("on") for name in node.attributes)
        assert node.tag != "style"
        if node.tag == "script":
            assert (node.attributes["src"], node.text) == ("/page.js", "")


@pytest.mark.parametrize("scene", SCENES)
def test_every_id_stands_once_and_every_reference_leads_somewhere(scene: str) -> None:
    nodes = list(tree(SCENES[scene]).all("*"))
    ids = [node.attributes["id"] for node in nodes if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    for node in nodes:
        wanted = [
            node.attributes[name]
            for name in ("aria-labelledby", "aria-describedby", "for")
            if name in node.attributes
        ]
        wanted += [link[1:] for link in [node.attributes.get("href", "")] if link.startswith("#")]
        assert set(wanted) <= set(ids)


@pytest.mark.parametrize("scene", SCENES)
def test_tables_have_captions_and_drawings_are_told_or_hidden(scene: str) -> None:
    node = tree(SCENES[scene])
    for table in node.all("table"):
        assert table.one("caption").text
        assert all(head.attributes["scope"] in ("col", "row") for head in table.all("th"))
    named = {
        id(inner)
        for drawing in node.all("*")
        if drawing.attributes.get("role") == "img" or drawing.attributes.get("aria-hidden") == "true"
        for inner in drawing.all("svg")
    }
    for drawing in node.all("svg"):
        told = drawing.attributes.get("role") == "img" or drawing.attributes.get("aria-hidden") == "true"
        assert told or id(drawing) in named


@pytest.mark.parametrize("view", [{}, {"tables": True}, {"still": True}])
def test_text_of_a_hub_never_becomes_markup(view: dict[str, bool]) -> None:
    evil = "</section></svg><img src=x onerror=alert(1)><!-- rows -->&"
    seen = snapshot(
        shard(0, host=evil, error=evil),
        log=(LogEntry(1, 1.7e9, "error", evil),),
        workers=[
            worker(0, host=evil, metrics={evil: 1.0}),
            worker(1, host=evil, seconds_since_heartbeat=3.0),
        ],
        samples=[ProgressSample(1.0, 1, 1.0, 1.0, 1.0, ((evil, 1.0),))],
        replace={"3": evil},
        **dict.fromkeys(("job", "state", "failure", "slowest", "mode", "checkpoint"), evil),
        world_size=4,
        ended={"finished": [], "preempted": [], "failed": {"2": evil}, "lost": {"3": evil}},
    )
    made = html_page(Rendering(seen, sections(seen)), **view)
    assert "<img" not in made
    assert "<!-- rows" not in made
    assert not list(html_tree(made).all("img"))
    assert "<img" not in answer_page("Not done", evil)


def test_the_page_holds_no_token_and_its_form_is_sent_by_post() -> None:
    node = tree(SCENES["training"], still=True)
    form = node.one("form")
    assert form.attributes["method"] == "post"
    assert "value" not in by_id(node, "token").attributes
    assert [each.attributes["formaction"] for each in form.all("button")] == ["/checkpoint", "/drain", "/end"]


def test_a_browser_without_scripts_loads_it_again_but_never_under_somebody_who_types() -> None:
    again = [each for each in tree(SCENES["training"]).all("meta") if "http-equiv" in each.attributes]
    assert [each.attributes["content"] for each in again] == ["2"]
    assert "hidden" in tree(SCENES["training"]).one("form").attributes
    assert any(each.attributes["href"] == "/?still=1#controls" for each in tree(SCENES["training"]).all("a"))
    still = tree(SCENES["training"], still=True)
    assert not [each for each in still.all("meta") if "http-equiv" in each.attributes]
    assert "hidden" not in still.one("form").attributes


def test_every_state_has_its_word_in_the_table_and_its_sign_in_the_picture() -> None:
    node = tree(SCENES["every state"])
    told = {rank: by_id(node, f"worker-{rank}").text for rank in range(8)}
    words = ["training", "blocked for 4 s", "silent for 3 s", "finished", "stopped on request"]
    words += ["failed: out of memory", "lost: silent", "not joined"]
    assert all(word in told[rank].replace("\xa0", " ") for rank, word in enumerate(words)), told
    signs = {rank: by_id(node, f"node-{rank}").text for rank in range(8)}
    for rank, state in [(1, "blocked"), (2, "silent"), (3, "finished"), (4, "stopped"), (5, "failed")]:
        assert SIGNS[state] in signs[rank]  # type: ignore[index]


def test_alarms_are_written_as_sentences() -> None:
    assert list(alarms(SCENES["every state"])) == [
        "Rank 2 (node1 pid 1002) has been silent for 3 s; after 5 s it is lost.",
        "1 worker has been blocked for up to 4 s; the slowest worker is rank 0 (node1 pid 1000) at step 40.",
    ]
    assert list(alarms(SCENES["failed"])) == ["shard 0 is gone", "shard 0 does not answer"]
    late = snapshot(shard(0, seconds_since_heartbeat=2.8))
    assert list(alarms(late)) == ["Shard 0 (node0 pid 2000) has been silent for 2 s."]
    assert list(alarms(snapshot(shard(0, seconds_since_heartbeat=1.8)))) == []
    assert list(alarms(SCENES["training"])) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "train.py: 4 workers train through the hub (bsp)"),
        ({"topology": "ring"}, "train.py: 4 workers train on the ring"),
        ({"draining": True}, "train.py: 4 workers finish the step and leave"),
        ({"failure": "x"}, "train.py has failed"),
        ({"job": ""}, "No job yet: waiting for the first worker"),
        ({"started": False, "state": "waiting for 1 of 4 workers"}, "train.py: waiting for 1 of 4 workers"),
        ({"workers": []}, "train.py has ended"),
    ],
)
def test_the_headline_says_what_is_going_on(changes: dict[str, Any], words: str) -> None:
    assert headline(snapshot(**changes)) == words


def test_a_hubs_picture_links_every_worker_with_every_shard() -> None:
    node = by_id(tree(SCENES["training"]), "picture")
    links = [each.attributes["d"] for each in node.all("path")]
    assert [link.count("L") for link in links] == [2, 2, 2, 2]
    assert "in 4\u00a0MB" in by_id(node, "box-0").text
    assert "out 5\u00a0MB" in by_id(node, "box-1").text


def test_a_rings_picture_links_every_worker_with_the_next() -> None:
    node = by_id(tree(SCENES["ring"]), "picture")
    assert not list(node.all("rect")), "the server's shards take no part"
    for rank in range(4):
        here, there = (by_id(node, f"node-{each % 4}") for each in (rank, rank + 1))
        begin, end = re.findall(r"^M([\d. ]+)A.* ([\d.]+ [\d.]+)$", here.one("path").attributes["d"])[0]
        for spot, ends_at in ((begin, here), (end, there)):
            circle = ends_at.one("circle").attributes
            middle = float(circle["cx"]), float(circle["cy"])
            assert math.dist(middle, [*map(float, spot.split())]) <= float(circle["r"]) + 0.1


def test_the_staleness_of_all_shards_is_added_up() -> None:
    seen = snapshot(shard(0), shard(1, staleness={"0": 50, "4": 2}))
    assert seen.staleness == {0: 200, 3: 10, 4: 2}
    told = by_id(tree(seen), "staleness-table").text
    assert "200" in told


def test_staleness_has_at_most_sixteen_bins_and_loses_no_push() -> None:
    counts = {value: value + 1 for value in range(100)}
    found = bins(counts)
    assert len(found) <= 16
    assert sum(each.times for each in found) == sum(counts.values())
    assert (found[0].label, bins({0: 3, 1: 1})[1].label) == ("0–6", "1")
    assert bins({}) == ()


def test_a_section_is_sent_whole_where_its_rows_come_or_go() -> None:
    before = sections(snapshot(shard(0), workers=[worker(0)], world_size=1))
    after = sections(snapshot(shard(0), workers=[worker(0), worker(1)], world_size=2))
    changed = changes(before, after)
    assert {"workers", "picture", "waits"} <= changed.keys()
    assert "worker-1" not in changed


def test_every_metric_has_a_curve_with_its_values_and_a_column() -> None:
    samples = [
        ProgressSample(float(at), at, 1.0, 8.0, 64.0, (("lr", 0.1 / (1 + at)),) * (at > 0)) for at in range(3)
    ]
    node = by_id(tree(snapshot(samples=samples)), "course")
    titles = [each.text for each in node.all("figcaption")]
    assert titles[2:] == ["Samples per second, in total: 64", "lr: 0.03333"]
    chart = by_id(node, "metric-0-chart").attributes
    assert (chart["data-steps"], chart["data-values"]) == ("1 2", "0.05 0.03333")
    assert node.one("thead").text.endswith("Samples/s in totallr")
    assert by_id(node, "metric-0-chart").text.endswith("step 1step 2")
    rows = [by_id(node, f"sample-{1000 * at}").all("td") for at in (2, 0)]
    assert [[*row][-1].text for row in rows] == ["0.03333", "–"]


def test_curves_are_over_seconds_where_the_script_counts_no_steps() -> None:
    samples = [ProgressSample(at, 0, 1.0, 0.0) for at in (30.0, 31.0)]
    assert by_id(tree(snapshot(samples=samples)), "loss-chart").text.endswith("second 30second 31")


def test_progress_and_time_left_are_figures_where_the_job_reports_them() -> None:
    workers = [worker(0, total_steps=9000, metrics={"epoch": 3.0})]
    summary = by_id(tree(snapshot(workers=workers, progress=0.425, seconds_left=125.0)), "summary")
    assert summary.one("rect").attributes["width"] == "42.5%"
    figures = summary.one("dl").text
    assert "Step40 of 9,000Epoch3Done42\u00a0%Time left, about2 min 5\u00a0s" in figures
    without = by_id(tree(SCENES["training"]), "summary")
    assert not list(without.all("rect"))
    assert "Done" not in without.one("dl").text
    assert "hubring.report(total_steps=...)" in without.text


def test_usage_and_samples_stand_beside_each_worker_and_shard() -> None:
    sent = {"gpu_bytes": 2_000_000_000, "gpu_use": 0.5, "samples": 9, "samples_per_second": 64.5}
    rates = Rates()
    for at in (0.0, 4.0):
        workers = [worker(0, cpu_seconds=10.0 + 1.5 * at, **sent)]
        shards = [shard(0, cpu_seconds=1.0 + at / 4)]
        seen = Snapshot.of(report(workers=workers, seconds_up=at) | {"shards": shards}, rates, (), ())
    node = tree(seen)
    cells = [each.text.replace("\u00a0", " ") for each in by_id(node, "worker-0").all("td")]
    assert cells[1:] == ["40", "2", "64.5", "0.5", "1.50", "400 MB", "2 GB", "50 %", "node1 pid 1000"]
    cells = [each.text.replace("\u00a0", " ") for each in by_id(node, "shard-0").all("td")]
    assert cells[-3:] == ["0.25", "300 MB", "node0 pid 2000"], "of GPUs nothing where there is none"


def test_a_lost_rank_says_how_to_replace_it() -> None:
    command = "ps-worker --server 127.0.0.1:5555 --rank 6 train.py"
    node = tree(snapshot(shard(0), **ALL_STATES, replace={"6": command}))
    assert by_id(node, "worker-6").one("code").text == command
    assert not list(by_id(node, "worker-5").all("code"))


def test_a_shard_that_holds_nothing_is_drawn_so_and_has_no_links() -> None:
    node = by_id(tree(snapshot(shard(0), shard(1, keys=0), shard(2))), "picture")
    assert by_id(node, "box-1").attributes["class"] == "shard empty"
    assert "holdsnothing" in by_id(node, "box-1").text
    assert [each.attributes["d"].count("L") for each in node.all("path")] == [2, 2, 2, 2]


def test_one_value_alone_and_equal_values_can_be_drawn() -> None:
    for points in ([(0, 2.0)], [(0, 0.0), (1, 0.0)], [(3, 0.0), (3, 1.0)], [(0, -1.0), (5, 1e9)]):
        drawn = curve("x", "a curve", points, number)["path"]
        assert drawn
        assert "nan" not in drawn
        assert "inf" not in drawn


def test_a_cut_network_is_told_in_few_sentences() -> None:
    silent = [worker(rank, seconds_since_heartbeat=3.0) for rank in range(64)]
    told = list(alarms(snapshot(count=64, workers=silent)))
    assert len(told) == 4
    assert told[-1] == "61 more workers are silent; see the table of workers."


def test_a_shard_that_holds_nothing_is_at_no_version() -> None:
    shards = [shard(0), shard(1, oldest_version=39), shard(2, keys=0, oldest_version=0, newest_version=0)]
    rows = SECTIONS["shards"](Snapshot.of(report() | {"shards": shards}, Rates(), (), ()), MarkupCache()).rows
    for said, row in zip((">40<", ">39 to 40<", ">holds nothing<"), rows.values(), strict=True):
        assert said in row


def test_the_courses_table_begins_with_the_newest_and_keeps_its_rows() -> None:
    samples = [ProgressSample(float(second), second, 1.0, 8.0) for second in range(200)]
    before, after = (
        SECTIONS["course"](
            Snapshot.of(report() | {"shards": []}, Rates(), samples[:count], ()), MarkupCache()
        ).rows
        for count in (199, 200)
    )
    assert next(iter(before)) == "sample-198000"
    assert next(iter(after)) == "sample-199000"
    assert len(before.keys() - after.keys()) <= 1
    assert len(after) <= 26


@pytest.mark.parametrize(("workers", "clear"), [(1, 1.0), (2, 1.0), (5, 1.0), (12, 1.0), (64, 0.7)])
@pytest.mark.parametrize("shards", [1, 2, 4, 12])
def test_no_link_crosses_another_worker_or_shard(workers: int, clear: float, shards: int) -> None:
    boxes, radius = shard_boxes(shards), worker_radius(workers, ARC)
    assert all(box.x >= 0 and box.x + box.width <= SIDE and box.y + box.height <= SIDE for box in boxes)
    places = [on_arc(index, workers, RIM) for index in range(workers)]
    assert all(place.y + radius < boxes[0].y for place in places)
    for here, other in itertools.permutations(places, 2):
        for end in (box.top for box in boxes):
            link, away = (end.x - here.x, end.y - here.y), (other.x - here.x, other.y - here.y)
            beside = abs(link[0] * away[1] - link[1] * away[0]) / math.hypot(*link)
            ahead = link[0] * away[0] + link[1] * away[1] > 0
            assert not ahead or beside > clear * radius, (here, other, end)
