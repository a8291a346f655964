"""The verdict says whether the hub beats the ring, and gives no reason that the numbers do not give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hubring.workers.compare.decide.decision import Comparisons
from hubring.workers.compare.decide.verdict import verdict as in_words
from hubring.workers.compare.plan.experiment import LinkTable, StragglerTable
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import Line
from tests.support.compare.replayed import SEEDS, Replayed, findings, paced, record, verdict


def test_a_pace_that_is_not_told_apart_is_not_called_even(tmp_path: Path) -> None:
    def records(run: PlannedRun) -> list[Line]:
        asp = run.row.name == "hub-asp"
        lines = record(0.01 * ((0.6, 1.1, 0.7)[run.seed] if asp else 1.0), pause=0.0)
        return [{**line, "test_accuracy": 0.1} if asp and "epoch" in line else line for line in lines]

    said = verdict(tmp_path, Replayed(records=records))
    assert (
        "hub-asp and hub-bsp show no clear difference in samples per second (a ratio of 1.29 (0.59 to 2.83))"
        in said
    )


@pytest.mark.parametrize(
    ("hub", "said"),
    [(0.02, "The hub (hub-bsp) loses to the ring"), (0.005, "The hub (hub-bsp) beats the ring")],
)
def test_the_verdict_says_if_the_hub_wins_or_loses_and_why(tmp_path: Path, hub: float, said: str) -> None:
    words = verdict(tmp_path, paced({"hub-bsp": hub}, waits={"hub-bsp": hub / 2}))
    assert said in words
    verb = "loses" if "loses" in said else "wins"
    assert f"The hub {verb} here because its steps wait {500 * hub:.2f} ms for exchange" in words
    assert ("cores and copies are the limit, not links: its 3 busy processes share 2 cores" in words) == (
        verb == "loses"
    )


@pytest.mark.parametrize(("hub", "wait"), [(0.005, 0.012), (0.02, 0.004), (0.005, 0.005)])
def test_a_wait_that_points_the_other_way_or_nowhere_is_no_reason(
    tmp_path: Path, hub: float, wait: float
) -> None:
    assert "its steps wait" not in verdict(tmp_path, paced({"hub-bsp": hub}, waits={"hub-bsp": wait}))


SLOW = StragglerTable(kind="pareto", seconds=(0.02,), ranks=(1,))


def test_a_straggler_is_not_put_down_to_cores(tmp_path: Path) -> None:
    bare = verdict(tmp_path / "bare", paced({"hub-bsp": 0.02}), straggler=SLOW)
    link = LinkTable(rate=(1e9,))
    linked = verdict(tmp_path / "link", paced({"hub-bsp": 0.02}), straggler=SLOW, link=link)
    assert "The hub (hub-bsp) loses" in bare
    assert "The hub (hub-bsp) loses" in linked
    assert "cores and copies" not in bare
    assert "limited less by its links" not in linked


def test_with_latency_alone_the_reason_is_how_often_it_is_waited_for(tmp_path: Path) -> None:
    link = LinkTable(latency=(0.02,))
    said = verdict(tmp_path, paced({"hub-bsp": 0.005}), workers=(4,), link=link)
    assert (
        "The hub wins here because its exchange includes the link latency 2 times (40 ms), the ring's"
        " at least 12 times (240 ms)."
    ) in said


@pytest.mark.parametrize(("hub", "seconds", "workers"), [("hub-bsp", 0.02, 4), ("hub-standby", 0.005, 2)])
def test_latency_is_no_reason_where_the_hub_loses_or_the_ring_waits_as_often(
    tmp_path: Path, hub: str, seconds: float, workers: int
) -> None:
    link = LinkTable(latency=(0.02,))
    said = verdict(tmp_path, paced({hub: seconds}), rows=("ring", hub), workers=(workers,), link=link)
    assert f"The hub ({hub})" in said
    assert "because" not in said


@pytest.mark.parametrize("hub", [0.005, 0.02])
def test_a_loss_that_latency_may_cause_is_not_attributed_to_cores(tmp_path: Path, hub: float) -> None:
    link = LinkTable(rate=(1e9,), latency=(0.02,))
    said = verdict(tmp_path, paced({"hub-bsp": hub}), workers=(4,), link=link)
    assert "limited less by its links" not in said
    assert ("carries 4 times the model" in said) == (hub == 0.02)


def test_a_win_on_links_is_not_put_down_to_what_holds_the_hub_up(tmp_path: Path) -> None:
    link = LinkTable(rate=(1e9,))
    said = verdict(tmp_path, paced({"hub-bsp": 0.005}), workers=(4,), servers=(4,), link=link)
    assert "The hub wins here because with 4 workers and 4 servers, its busiest link carries 1 times" in said
    assert "limited less by its links" not in said


def test_the_row_that_stands_for_the_hub_is_not_picked_by_its_speed(tmp_path: Path) -> None:
    rows = ("ring", "hub-aggregate", "hub-bsp")
    said = verdict(tmp_path / "both", paced({"hub-aggregate": 0.005}), rows=rows)
    assert "The hub (hub-bsp) is as fast as the ring" in said
    assert "Of the other hub rows, hub-aggregate is 2.00 times as fast as hub-bsp." in said
    said = verdict(tmp_path / "one", paced({"hub-aggregate": 0.005}), rows=rows[:2])
    assert "The hub (hub-aggregate) beats the ring" in said


def test_on_a_cluster_no_machine_s_cores_are_blamed(tmp_path: Path) -> None:
    trainer = paced({"hub-bsp": 0.02, "local": 0.001}, waits={"ring": 0.002})
    cluster = {"cores": 64, "launcher": "slurm", "hosts": {"a": {}, "b": {}}}
    said = "\n".join(
        in_words(Comparisons(replace(findings(tmp_path, trainer, seeds=SEEDS), machine=cluster)), ())
    )
    assert "The hub loses here because its steps wait 5.00 ms" in said
    assert "on one machine" not in said
    assert "these machines have too few cores" in said


def test_behind_links_the_bytes_are_the_reason(tmp_path: Path) -> None:
    said = verdict(
        tmp_path, paced({"hub-bsp": 0.02}), workers=(4,), servers=(2,), link=LinkTable(rate=(1e9,))
    )
    assert (
        "with 4 workers and 2 servers, its busiest link carries 2 times the model each way, the ring's 1.5"
        in said
    )
    assert "by bytes alone the hub wins with 3 or more servers (k > n^2/(2(n-1)))" in said


@pytest.mark.parametrize(("rate", "beyond"), [(1e9, True), (1e5, False)])
def test_links_are_not_blamed_for_what_takes_far_longer_than_they_do(
    tmp_path: Path, rate: float, beyond: bool
) -> None:
    link = LinkTable(rate=(rate,))
    said = verdict(tmp_path, paced({"hub-bsp": 0.02}), workers=(4,), servers=(2,), link=link)
    words = "limited less by its links than by the 2 cores on which 6 processes move"
    assert (words in said) == beyond
    assert ("; but at line rate its bytes take 0 ms, so" in said) == beyond


@pytest.mark.parametrize("row", ["hub-colocated", "hub-standby"])
@pytest.mark.parametrize("link", [None, LinkTable(rate=(1e9,))])
def test_a_hub_with_another_number_of_servers_has_no_reason_that_counts_them(
    tmp_path: Path, row: str, link: LinkTable | None
) -> None:
    asked = {"rows": ("ring", row), "workers": (4,), "servers": (2,), "link": link}
    said = verdict(tmp_path, paced({row: 0.02}), **asked)
    assert f"The hub ({row}) loses to the ring" in said
    assert "The hub loses here because" not in said


def test_an_asynchronous_hub_is_not_held_against_the_ring_as_a_hub(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"hub-asp": 0.001}), rows=("ring", "hub-asp"))
    assert "The hub" not in said
    assert "hub-asp processes samples 10.00 times as fast as ring, and is" in said


# At the target after all steps, where the others are there after a fourth of theirs; or never.
@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        (lambda step: step / 400, "takes 1.91 times as long to test accuracy 0.93."),
        (
            lambda step: 0.1,
            "does not reach test accuracy 0.93 with every seed, while hub-bsp does (it ends at 0.100",
        ),
    ],
    ids=["later", "never"],
)
def test_faster_by_step_yet_later_or_never_at_the_target_is_said(
    tmp_path: Path, accuracy: Callable[[int], float], said: str
) -> None:
    def records(run: PlannedRun) -> list[Line]:
        if run.row.name != "hub-asp":
            return record(0.02, pause=0.0)
        lines = record(0.01, steps=400, pause=0.0)
        return [
            {**line, "test_accuracy": accuracy(line["step"])} if "epoch" in line else line for line in lines
        ]

    words = verdict(tmp_path, Replayed(records=records))
    assert f"hub-asp processes samples 2.00 times as fast as hub-bsp, but {said}" in words
    assert ("hub-asp did not reach test accuracy 0.93." in words) == ("not reach" in said)


def test_a_higher_loss_is_a_worse_result(tmp_path: Path) -> None:
    def records(run: PlannedRun) -> list[Line]:
        asp = run.row.name == "hub-asp"
        lines = record(0.01 if asp else 0.02, pause=0.0)
        return [{**line, "bits_per_char": 9.0 if asp else 8.0} if "epoch" in line else line for line in lines]

    words = verdict(tmp_path, Replayed(records=records), job="char-lm")
    assert "2.00 times as fast as hub-bsp, but ends with a worse result" in words
