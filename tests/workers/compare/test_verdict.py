"""The words follow from the numbers, and claim no more than these show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hubring.workers.compare.experiment.experiment import (
    ComputeTable,
    FaultTable,
    LinkTable,
    StragglerTable,
)
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.judge.verdict import verdict as in_words
from hubring.workers.compare.result.ratio import Ratio, ratio
from hubring.workers.compare.result.reading import read
from hubring.workers.compare.run.outcome import Line
from tests.support.compare.replayed import Replayed, compared, findings, record

SEEDS = (0, 1, 2)
CALM = (1.0, 1.02, 0.98)
"""Seeds differ a little, in all rows alike."""


def paced(
    steps: dict[str, float],
    noise: Mapping[str, tuple[float, ...]] | None = None,
    waits: dict[str, float] | None = None,
) -> Replayed:
    """Rows with these seconds a step, 10 ms where none is given, and of waiting, 5 ms likewise."""

    def records(run: Run) -> list[Line]:
        name = run.row.name
        factors = (noise or {}).get(name, CALM)
        exposed = (waits or {}).get(name, 0.005)
        return record(steps.get(name, 0.01) * factors[run.seed], pause=0.0, exposed=exposed)

    return Replayed(records=records)


def verdict(folder: Path, trainer: Replayed, **changes: Any) -> str:
    found: list[str] = compared(folder, trainer, **{"seeds": SEEDS, **changes})["verdict"]
    return "\n".join(found)


def test_who_is_first_to_the_target_is_said_with_by_how_much(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"ring": 0.02, "hub-bsp": 0.04, "local": 0.05, "hub-asp": 0.06}))
    assert "First to test accuracy 0.93 is ring, in 1.98 s; hub-bsp needs 2.00 times" in said


def test_rows_whose_whole_interval_is_nearly_1_are_even(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"hub-asp": 0.5, "ring": 0.0101}), rows=("ring", "hub-bsp", "hub-asp"))
    assert "First to test accuracy 0.93 are hub-bsp and ring, even in 0.99 to 1.00 s; hub-asp needs" in said
    assert "The hub (hub-bsp) is even with the ring" in said


def test_rows_that_may_differ_by_half_are_not_told_apart_rather_than_even(tmp_path: Path) -> None:
    noisy = {"hub-bsp": (1 / 1.50, 1 / 1.60, 1 / 0.95), "ring": (1.0, 1 / 1.01, 1 / 1.02)}
    noisy["hub-asp"] = noisy["hub-bsp"]
    said = verdict(tmp_path, paced({}, noisy), rows=("ring", "hub-bsp", "hub-asp"))
    apart = "seed by seed a factor of 1.50 (0.93 to 1.58)."
    assert f"The hub (hub-bsp) is not told apart from the ring: 9,600 images/s against 6,464, {apart}" in said
    assert "are hub-bsp, hub-asp and ring, not told apart in 0.66 to 0.98 s: ring 1.50 (0.93 to 1.58)" in said
    assert "even with the ring" not in said


def test_a_pace_that_is_not_told_apart_is_not_called_even(tmp_path: Path) -> None:
    def records(run: Run) -> list[Line]:
        asp = run.row.name == "hub-asp"
        lines = record(0.01 * ((0.6, 1.1, 0.7)[run.seed] if asp else 1.0), pause=0.0)
        return [{**line, "test_accuracy": 0.1} if asp and "epoch" in line else line for line in lines]

    said = verdict(tmp_path, Replayed(records=records))
    assert "hub-asp is not told apart from hub-bsp in samples a second, at 1.43 (0.91 to 1.67)" in said


def test_with_one_seed_nothing_is_even_and_nobody_beats_anybody(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"ring": 0.0102}), seeds=(0,))
    assert "The hub (hub-bsp) was 1.02 times as fast as the ring in this one run" in said
    assert "beats" not in verdict(tmp_path, paced({"ring": 0.05}), seeds=(0,))


def test_a_hundredth_is_no_win_even_if_every_seed_shows_it(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"ring": 0.0101}))
    assert "The hub (hub-bsp) is even with the ring" in said


@pytest.mark.parametrize(
    ("hub", "said"),
    [(0.02, "The hub (hub-bsp) loses to the ring"), (0.005, "The hub (hub-bsp) beats the ring")],
)
def test_it_says_plainly_whether_the_hub_wins_or_loses_and_why(tmp_path: Path, hub: float, said: str) -> None:
    words = verdict(tmp_path, paced({"hub-bsp": hub}, waits={"hub-bsp": hub / 2}))
    assert said in words
    verb = "loses" if "loses" in said else "wins"
    assert f"The hub {verb} here, because its steps wait {500 * hub:.2f} ms for the exchange" in words
    assert ("copies and cores decide, not wires: 3 busy processes share 2 cores" in words) == (
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
    assert "cores decide" not in bare
    assert "what holds the hub up" not in linked


def test_with_latency_alone_the_reason_is_how_often_it_is_waited_for(tmp_path: Path) -> None:
    link = LinkTable(latency=(0.02,))
    said = verdict(tmp_path, paced({"hub-bsp": 0.005}), workers=(4,), link=link)
    assert (
        "The hub wins here, because the links' latency is in its exchange twice, 40 ms, and in the ring's"
        " 6 times, 120 ms."
    ) in said


@pytest.mark.parametrize(("hub", "workers"), [(0.02, 4), (0.005, 2)])
def test_latency_is_no_reason_where_the_ring_waits_less_or_as_often(
    tmp_path: Path, hub: float, workers: int
) -> None:
    link = LinkTable(latency=(0.02,))
    said = verdict(tmp_path, paced({"hub-bsp": hub}), workers=(workers,), link=link)
    assert "The hub (hub-bsp)" in said
    assert "because" not in said


@pytest.mark.parametrize("hub", [0.005, 0.02])
def test_what_latency_may_have_done_is_not_put_down_to_cores(tmp_path: Path, hub: float) -> None:
    link = LinkTable(rate=(1e9,), latency=(0.02,))
    said = verdict(tmp_path, paced({"hub-bsp": hub}), workers=(4,), link=link)
    assert "what holds the hub up" not in said
    assert ("move 4 times the model" in said) == (hub == 0.02)


def test_a_win_on_links_is_not_put_down_to_what_holds_the_hub_up(tmp_path: Path) -> None:
    link = LinkTable(rate=(1e9,))
    said = verdict(tmp_path, paced({"hub-bsp": 0.005}), workers=(4,), servers=(4,), link=link)
    assert "The hub wins here, because 4 workers on 4 servers move 1 times the model" in said
    assert "what holds the hub up" not in said


def test_the_row_that_stands_for_the_hub_is_not_picked_by_its_speed(tmp_path: Path) -> None:
    rows = ("ring", "hub-aggregate", "hub-bsp")
    said = verdict(tmp_path / "both", paced({"hub-aggregate": 0.005}), rows=rows)
    assert "The hub (hub-bsp) is even with the ring" in said
    assert "Of the hub's other ways, hub-aggregate is 2.00 times as fast as hub-bsp." in said
    said = verdict(tmp_path / "one", paced({"hub-aggregate": 0.005}), rows=rows[:2])
    assert "The hub (hub-aggregate) beats the ring" in said


def test_on_a_cluster_no_machine_s_cores_are_blamed(tmp_path: Path) -> None:
    trainer = paced({"hub-bsp": 0.02, "local": 0.001}, waits={"ring": 0.002})
    cluster = {"cores": 64, "launcher": "slurm", "hosts": {"a": {}, "b": {}}}
    said = "\n".join(in_words(replace(findings(tmp_path, trainer, seeds=SEEDS), machine=cluster)))
    assert "The hub loses here, because its steps wait 5.00 ms" in said
    assert "on one machine" not in said
    assert "these machines have too few cores" in said


def test_behind_links_the_bytes_are_the_reason(tmp_path: Path) -> None:
    said = verdict(
        tmp_path, paced({"hub-bsp": 0.02}), workers=(4,), servers=(2,), link=LinkTable(rate=(1e9,))
    )
    assert (
        "4 workers on 2 servers move 2 times the model each way over the busiest link, and the ring 1.5"
        in said
    )
    assert "by bytes alone it wins from 3 servers on (k > n^2/(2(n-1)))" in said


@pytest.mark.parametrize(("rate", "beyond"), [(1e9, True), (1e5, False)])
def test_links_are_not_blamed_for_what_takes_far_longer_than_they_do(
    tmp_path: Path, rate: float, beyond: bool
) -> None:
    link = LinkTable(rate=(rate,))
    said = verdict(tmp_path, paced({"hub-bsp": 0.02}), workers=(4,), servers=(2,), link=link)
    words = "what holds the hub up here is less its links than the 2 cores on which 6 processes move"
    assert (words in said) == beyond
    assert ("; yet at line rate its bytes take 0 ms: what" in said) == beyond


def test_one_worker_behind_a_link_has_no_crossover(tmp_path: Path) -> None:
    link = LinkTable(rate=(1e9,))
    said = verdict(tmp_path, paced({"hub-bsp": 0.02}), workers=(1,), servers=(1,), link=link)
    assert "by bytes alone it never wins" in said


def test_an_asynchronous_hub_is_not_held_against_the_ring_as_a_hub(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"hub-asp": 0.001}), rows=("ring", "hub-asp"))
    assert "The hub" not in said
    assert "hub-asp goes through its samples 10.00 times as fast as ring, and reaches" in said


def test_faster_by_step_yet_later_at_the_target_is_said(tmp_path: Path) -> None:
    def records(run: Run) -> list[Line]:
        if run.row.name != "hub-asp":
            return record(0.02, pause=0.0)
        # Twice as fast, and after all of its steps where the others are after a fourth of theirs.
        return [
            {**line, "test_accuracy": line["step"] / 400} if "epoch" in line else line
            for line in record(0.01, steps=400, pause=0.0)
        ]

    said = verdict(tmp_path, Replayed(records=records))
    assert "hub-asp goes through its samples 2.00 times as fast as hub-bsp, yet reaches" in said
    assert "test accuracy 0.93 1.91 times later." in said


def test_faster_by_step_yet_never_at_the_target_is_said(tmp_path: Path) -> None:
    def records(run: Run) -> list[Line]:
        if run.row.name != "hub-asp":
            return record(0.02, pause=0.0)
        return [
            {**line, "test_accuracy": 0.1} if "epoch" in line else line for line in record(0.01, pause=0.0)
        ]

    said = verdict(tmp_path, Replayed(records=records))
    assert "hub-asp did not reach test accuracy 0.93." in said
    assert "times as fast as hub-bsp, yet does not reach test accuracy 0.93 with every seed" in said
    assert "(it ends at 0.100, hub-bsp at 1.000)" in said


def test_a_target_reached_with_some_seeds_only_wins_no_race(tmp_path: Path) -> None:
    def records(run: Run) -> list[Line]:
        lines = record(0.001 if run.row.name == "hub-asp" else 0.02, pause=0.0)
        return lines[:60] if (run.row.name, run.seed) == ("hub-asp", 1) else lines

    said = verdict(tmp_path, Replayed(records=records))
    assert "hub-asp reached with 2 of 3 seeds only test accuracy 0.93." in said
    assert "First to test accuracy 0.93 are local, ring and hub-bsp" in said


def test_one_process_alone_that_is_faster_is_named(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"local": 0.001}))
    assert "loses to one process alone, with as many threads as each worker:" in said
    assert "this job is too small, or this machine has too few cores, for dividing it to pay." in said


def test_the_row_held_against_one_process_is_not_picked_by_its_speed(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"local": 0.004, "ring": 0.005}))
    assert "hub-bsp loses to one process alone" in said
    assert "a factor of 1.25; faster than that process: ring." in said
    assert "too small" not in said


def by_straggler(slow: dict[str, float]) -> Callable[[Run], list[Line]]:
    """Steps of 10 ms, and what a straggler makes of them by row."""

    def records(run: Run) -> list[Line]:
        step = slow[run.row.name] if run.setting.straggler else 0.01
        return record(step * CALM[run.seed], pause=0.0)

    return records


def test_it_says_whom_a_straggler_slowed(tmp_path: Path) -> None:
    slow = {"ring": 0.03, "hub-bsp": 0.02, "hub-asp": 0.0101}
    table = StragglerTable(seconds=(0.02,), ranks=(1,), baseline=True)
    trainer = Replayed(records=by_straggler(slow))
    said = verdict(tmp_path, trainer, rows=tuple(slow), straggler=table)
    assert (
        "Rank 1 slower by 20 ms a step makes steps longer, ring 3.00 and hub-bsp"
        " 2.00 times as long, not hub-asp."
    ) in said
    assert "times of an emulated machine" in said


def test_a_straggler_whose_effect_varies_is_not_said_to_have_none(tmp_path: Path) -> None:
    def records(run: Run) -> list[Line]:
        factor = (0.9, 1.5, 1.6)[run.seed] if run.setting.straggler and run.row.name == "ring" else 1.0
        return record(0.01 * factor, pause=0.0)

    table = StragglerTable(seconds=(0.02,), ranks=(1,), baseline=True)
    trainer = Replayed(records=records)
    said = verdict(tmp_path, trainer, rows=("ring", "hub-bsp"), straggler=table)
    assert "Rank 1 slower by 20 ms a step does not slow hub-bsp." in said
    assert (
        "With rank 1 slower by 20 ms a step and without, steps are not told apart: ring 1.50 (0.90 to 1.60)"
        " times as long."
    ) in said


def test_it_says_who_did_not_survive_a_loss_and_who_did(tmp_path: Path) -> None:
    trainer = Replayed(failed={"ring": "lost its ring"})
    said = verdict(tmp_path, trainer, rows=("ring", "hub-bsp"), fault=FaultTable(rank=1, step=9))
    assert "ring failed where worker 1 was lost at step 9, in 3 of 3 runs: lost its ring." in said
    assert "hub-bsp went on to the end without worker 1." in said
    assert "images/s" not in said


def by_servers(folder: Path, steps: dict[int, float], **changes: Any) -> dict[str, Any]:
    """Four workers behind slow links; a step of the ring takes 30 ms."""

    def records(run: Run) -> list[Line]:
        return record(0.03 if run.row.name == "ring" else steps[run.setting.servers], pause=0.0)

    asked = {"rows": ("ring", "hub-bsp"), "link": LinkTable(rate=(2e8,))} | changes
    return compared(folder, Replayed(records=records), workers=(4,), servers=tuple(steps), **asked)


def test_it_says_from_how_many_servers_on_the_hub_wins(tmp_path: Path) -> None:
    results = by_servers(tmp_path, {1: 0.08, 2: 0.04, 4: 0.02})
    assert results["crossover"] == [
        {
            "setting": "n4 200mbit",
            "tried": [1, 2, 4],
            "measured": 4,
            "predicted": None,
            "calibrated": False,
            "by_bytes": 3,
            "formula": "k > n^2/(2(n-1))",
        }
    ]
    assert (
        "n4 200mbit, 1, 2, 4 servers tried: the hub steps faster than the ring from 4 servers on;"
        " nothing was predicted; by bytes alone (k > n^2/(2(n-1))) from 3 servers on."
    ) in results["verdict"]


@pytest.mark.parametrize(
    ("steps", "measured"),
    [
        ({1: 0.02, 2: 0.04, 4: 0.02}, 4),  # one that won by chance is not where it begins
        ({1: 0.08, 2: 0.0299, 4: 0.0295}, None),  # even
        ({1: 0.02, 2: 0.01}, 1),
    ],
)
def test_a_crossover_is_where_all_that_follow_win(
    tmp_path: Path, steps: dict[int, float], measured: int | None
) -> None:
    (crossover,) = by_servers(tmp_path, steps)["crossover"]
    assert crossover["measured"] == measured


def test_where_the_ring_did_not_run_nothing_is_said_of_a_crossover(tmp_path: Path) -> None:
    results = by_servers(tmp_path, {1: 0.08, 2: 0.04}, rows=("hub-bsp",))
    assert results["crossover"] == []


def test_a_prediction_stands_beside_the_measured_crossover(tmp_path: Path) -> None:
    results = by_servers(tmp_path, {1: 0.08, 4: 0.04})
    results["crossover"][0] |= {"predicted": 5, "calibrated": True}
    found = read(results)
    assert (
        "n4 200mbit, 1, 4 servers tried: the hub steps faster than the ring with no number of servers;"
        " predicted was from 5 servers on, and by bytes alone (k > n^2/(2(n-1))) from 3 servers on."
    ) in in_words(found)


def test_speed_by_workers_is_listed(tmp_path: Path) -> None:
    results = compared(tmp_path, rows=("ring",), workers=(2, 4))
    assert results["scaling"] == [
        {
            "row": "ring",
            "workers": [2, 4],
            "measured": [pytest.approx(6400), pytest.approx(12800)],
            "predicted": [None, None],
        }
    ]


def test_a_difference_that_may_be_rounding_comes_with_what_allows_more(tmp_path: Path) -> None:
    apart = {f"n2 k1 hub-bsp seed0{turn}": 1.01 for turn in ("", " turn1")}
    said = verdict(tmp_path, Replayed(parameters=apart), rows=("ring", "hub-bsp"), seeds=(0,))
    assert "If it is rounding, ps-compare report FOLDER --tolerance 0.001 allows more." in said


def test_a_hub_that_does_not_repeat_itself_is_no_matter_of_rounding(tmp_path: Path) -> None:
    apart = {"n2 k1 hub-bsp seed0 turn1": 1.01}
    said = verdict(tmp_path, Replayed(parameters=apart), rows=("ring", "hub-bsp"), seeds=(0,))
    assert "no difference at all is allowed" in said
    assert "tolerance" not in said


def test_what_weakens_the_verdict_is_said(tmp_path: Path) -> None:
    compute = ComputeTable(step=(0.05,))
    said = verdict(tmp_path, paced({}), seeds=(0,), lr="per-worker", compute=compute)
    assert "Asynchronous rows were given the job's learning rate divided by their workers" in said
    assert "Workers slept for a part of every step" in said
    assert "one seed, so nothing here tells chance from difference" in said


@pytest.mark.parametrize(
    ("first", "second", "decided"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], True),
        ([2.0, 0.9, 2.2], [1.0, 1.0, 1.0], False),
        ([1.01, 1.02, 1.02], [1.0, 1.0, 1.0], False),
        ([1.04], [1.0], False),
        ([1.06], [1.0], True),
    ],
)
def test_a_ratio_is_decided_where_its_interval_and_its_size_say_so(
    first: list[float], second: list[float], decided: bool
) -> None:
    found = ratio(first, second)
    assert found is not None
    assert found.decided is decided


def test_seeds_that_lack_a_number_are_left_out_of_the_ratio() -> None:
    assert ratio([None, 2.0], [1.0, 1.0]) == Ratio(2.0)
    assert ratio([None], [1.0]) is None


@pytest.mark.parametrize("wrong", [None, 0.0, -1.0, float("nan")])
def test_what_is_not_above_zero_has_no_ratio(wrong: float | None) -> None:
    assert ratio([wrong], [2.0]) is None
    assert ratio([2.0], [wrong]) is None
