"""Numbers come from the records by the definitions, and the words from the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps.errors import HubringError, UsageError
from workers.compare.job import JOBS
from workers.compare.measure import Measure, curves, measure
from workers.compare.outcome import Line, Outcome
from workers.compare.row import ROWS, select
from workers.compare.table import cells, columns, reasons
from workers.compare.verdict import verdict

DIGITS = JOBS["digits"]


def record(
    step_seconds: float, steps: int = 100, every: int = 10, pause: float = 3.0, samples: int = 32
) -> list[Line]:
    """Rank 0's: measured before the first step and after every tenth, which takes `pause` seconds."""
    now, lines = 0.0, []
    for step in range(steps + 1):
        if step:
            now += step_seconds
            lines.append({"step": step, "seconds": now, "loss": 2.0 / step, "samples": samples})
        if step % every == 0:
            now += pause
            lines.append(
                {"step": step, "seconds": now, "epoch": step // every, "test_loss": 1 / (1 + step)}
                | {"test_accuracy": step / steps}
            )
    return lines


def outcome(*records: list[Line]) -> Outcome:
    exchange = {"bytes_sent": 4000, "bytes_received": 6000, "exposed_seconds": 0.5}
    results = [
        {"exchange": exchange | {"staleness_mean": rank + 1.0, "staleness_max": 5 * rank}}
        for rank in range(len(records))
    ]
    return Outcome(records, results, Path("parameters"), ["ps-worker"])


def measured(name: str = "hub-bsp", **changes: float | None) -> Measure:
    rows = [record(0.1), record(0.1)] if name != "local" else [record(0.1)]
    return replace(measure(ROWS[name], outcome(*rows), DIGITS, 0.9), **changes)


def test_speed_leaves_out_warm_up_and_measuring_the_model() -> None:
    slow_start = record(0.1)
    late = [{**line, "seconds": line["seconds"] + (7.0 if line["step"] >= 8 else 0.0)} for line in slow_start]
    found = measure(ROWS["hub-bsp"], outcome(late, late), DIGITS, 0.9)
    assert found.samples_per_second == pytest.approx(2 * 32 / 0.1)
    assert found.step_ms == pytest.approx(100)


def test_others_are_not_charged_for_waiting_while_rank_0_measures() -> None:
    waiting = [line for line in record(0.1) if "samples" in line]
    found = measure(ROWS["hub-bsp"], outcome(record(0.1), waiting), DIGITS, 0.9)
    assert found.samples_per_second == pytest.approx(2 * 32 / 0.1)


def test_speed_counts_the_steps_on_which_a_rank_stood_still() -> None:
    stalled = [
        {**line, "seconds": line["seconds"] + (9.0 if line["step"] > 55 else 0.0)} for line in record(0.1)
    ]
    found = measure(ROWS["hub-asp"], outcome(stalled), DIGITS, 0.9)
    assert found.step_ms == pytest.approx(100)
    assert found.samples_per_second == pytest.approx(81 * 32 / (81 * 0.1 + 9.0))


def test_seconds_count_from_the_end_of_the_first_step() -> None:
    found = measured()
    # 89 more steps and the measurements after steps 10, 20 ... 90
    assert found.seconds_to_target == pytest.approx(89 * 0.1 + 9 * 3.0)
    assert found.seconds == pytest.approx(99 * 0.1 + 10 * 3.0)


def test_a_target_that_was_not_reached_has_no_time() -> None:
    found = measure(ROWS["hub-bsp"], outcome(record(0.1)), DIGITS, 1.1)
    assert found.seconds_to_target is None
    assert not found.reached


def test_bits_per_character_reach_their_target_from_above() -> None:
    lines = [
        {**line, "bits_per_char": 10 - line["step"] / 20} if "epoch" in line else line for line in record(0.1)
    ]
    found = measure(ROWS["ring"], outcome(lines), JOBS["char-lm"], 7.0)
    assert found.seconds_to_target == pytest.approx(59 * 0.1 + 6 * 3.0)


def test_traffic_and_waiting_are_means_over_workers_by_step_and_staleness_has_its_worst() -> None:
    found = measured()
    assert found.bytes_per_step == pytest.approx(100)
    assert found.exposed_ms_per_step == pytest.approx(5)
    assert (found.staleness_mean, found.staleness_max) == (1.5, 5)


def test_final_loss_and_measure_are_the_last_ones() -> None:
    found = measured()
    assert (found.final_loss, found.final_metric) == (pytest.approx(1 / 101), 1.0)


@pytest.mark.parametrize("lines", [[], record(0.1, steps=1)])
def test_a_record_without_steps_is_an_error(lines: list[Line]) -> None:
    with pytest.raises(HubringError, match="hub-bsp: a worker recorded fewer than two steps"):
        measure(ROWS["hub-bsp"], outcome(record(0.1), lines), DIGITS, 0.9)


def test_curves_average_the_ranks_losses_and_count_everyones_samples() -> None:
    other = [{**line, "loss": 4.0 / line["step"]} for line in record(0.1) if "samples" in line]
    found = curves(outcome(record(0.1), other), "test_accuracy")
    assert found["loss"][1] == {"seconds": pytest.approx(0.1), "samples": 128, "value": pytest.approx(1.5)}
    assert found["metric"][0] == {"seconds": 0.0, "samples": 0, "value": 0.0}
    assert found["metric"][-1]["samples"] == 100 * 64


def test_every_row_has_a_cell_for_every_column() -> None:
    assert len(cells(measured())) == len(columns(DIGITS, 0.9))


def test_a_row_whose_speed_is_withheld_shows_none_of_it_but_says_why() -> None:
    closed = measured().without_speeds("it differs")
    shown = dict(zip(columns(DIGITS, 0.9), cells(closed), strict=True))
    for head in ("images/s", "step ms", "s to 0.9", "exposed ms"):
        assert shown[head] == "withheld"
    assert shown["test accuracy"] == "1.000"
    assert reasons([measured("ring"), closed]) == ["hub-bsp: withheld, it differs"]
    assert [value for value in closed.as_json().values() if value is None] == [None] * 5


def test_the_verdict_says_who_was_fastest_to_the_target_and_by_how_much() -> None:
    rows = [measured("ring", seconds_to_target=2.0), measured("hub-bsp", seconds_to_target=5.0)]
    assert verdict(rows, DIGITS, 0.9)[0] == (
        "Fastest to test accuracy 0.9: ring, in 2.00 s; hub-bsp needed 2.50 times as long."
    )


@pytest.mark.parametrize(
    ("hub", "said"),
    [
        (500.0, "The hub (hub-bsp) loses to the ring: 500 images/s against 1,000, a factor of 2.00."),
        (3000.0, "The hub (hub-bsp) beats the ring: 3,000 images/s against 1,000, a factor of 3.00."),
        (1010.0, "The hub (hub-bsp) is even with the ring: 1,010 images/s against 1,000."),
    ],
)
def test_the_verdict_says_plainly_whether_the_hub_wins_or_loses(hub: float, said: str) -> None:
    rows = [
        measured("ring", samples_per_second=1000.0),
        measured("hub-bsp", samples_per_second=hub),
        measured("hub-aggregate", samples_per_second=100.0),
    ]
    assert said in verdict(rows, DIGITS, 0.9)


def test_an_asynchronous_hub_is_not_held_against_the_ring() -> None:
    rows = [measured("ring", samples_per_second=1000.0), measured("hub-asp", samples_per_second=9000.0)]
    assert not any("the ring" in sentence for sentence in verdict(rows, DIGITS, 0.9))


def test_the_verdict_says_when_one_process_alone_is_faster() -> None:
    rows = [measured("local", samples_per_second=4000.0), measured("ring", samples_per_second=1000.0)]
    assert "This job is too small, or this machine has too few cores, for dividing it to pay." in verdict(
        rows, DIGITS, 0.9
    )


def test_a_withheld_row_takes_no_part_in_the_verdict_but_is_named_first() -> None:
    rows = [measured("ring"), measured("hub-bsp").without_speeds("it differs")]
    said = verdict(rows, DIGITS, 0.9)
    assert said[0] == "No speed is shown for hub-bsp: it differs."
    assert not any("hub-bsp" in sentence for sentence in said[1:])


def test_a_row_that_missed_the_target_is_named() -> None:
    missed = measure(ROWS["ring"], outcome(record(0.1)), DIGITS, 1.1)
    assert verdict([missed], DIGITS, 1.1)[0] == "ring did not reach test accuracy 1.1 in 100 steps."


@pytest.mark.parametrize(
    ("names", "words"), [(["hub"], "no row 'hub'"), (["ring", "ring"], "twice"), ([], "names no row")]
)
def test_rows_that_cannot_be_meant_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        select(names)
