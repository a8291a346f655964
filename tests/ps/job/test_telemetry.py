"""What workers report is bounded and finite, whatever a script or a peer sends."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.job.telemetry import (
    LONGEST_METRIC_NAME,
    MOST_METRICS,
    MOST_READINGS,
    RATE_WINDOW_SECONDS,
    Completion,
    StepRate,
    Telemetry,
    TelemetryExporter,
    from_proto,
    reported_progress,
    shown,
)


def test_telemetry_survives_the_wire() -> None:
    sent = Telemetry({"accuracy": 0.5, "lr": 0.1}, 640, 0.25, 1.5, 1 << 30, 1 << 31)
    assert from_proto(sent.to_proto()) == sent
    assert from_proto(Telemetry().to_proto()) == Telemetry()


def test_only_finite_numbers_without_a_place_of_their_own_are_shown() -> None:
    with_a_place = dict.fromkeys(("loss", "samples", "progress", "total_steps"), 0.5)
    no_numbers = {
        "name": "resnet",
        "best": True,
        "nan": math.nan,
        "inf": math.inf,
        "huge": 10**400,
        "no": None,
    }
    reported = {**with_a_place, "accuracy": 0.5, "epoch": 3, **no_numbers}
    assert shown(reported.items()) == {"accuracy": 0.5, "epoch": 3.0}


def test_telemetry_that_cannot_be_sent_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def replaced() -> Telemetry:
        raise AttributeError("the script replaced param_groups")

    exporter = TelemetryExporter()
    assert from_proto(exporter.export(lambda: Telemetry(samples=3))).samples == 3
    with caplog.at_level(logging.WARNING):
        for take in (lambda: Telemetry(samples=1 << 64), replaced, replaced):
            assert exporter.export(take) == pb.Telemetry()
    assert [record.getMessage()[:46] for record in caplog.records] == [
        "the server does not get this worker's metrics:"
    ]


def test_a_peer_cannot_send_more_or_other_than_that() -> None:
    metrics = {f"{number:02}" + "x" * 1000: 1.0 for number in range(50)} | {"0": math.nan}
    found = from_proto(pb.Telemetry(metrics=metrics, progress=math.inf))
    assert len(found.metrics) == MOST_METRICS
    assert {len(name) for name in found.metrics} == {LONGEST_METRIC_NAME}
    assert found.progress is None


@pytest.mark.parametrize(
    ("reported", "part"),
    [
        ({}, None),
        ({"progress": 0.4}, 0.4),
        ({"progress": 1}, 1.0),
        ({"progress": 40}, None),
        ({"progress": "half"}, None),
        ({"total_steps": 200}, 0.25),
        ({"total_steps": 40}, 1.0),
        ({"total_steps": 0}, None),
        ({"progress": 0.3, "total_steps": 200}, 0.3),
    ],
)
def test_progress_is_reported_or_follows_from_the_number_of_steps(
    reported: dict[str, Any], part: float | None
) -> None:
    assert reported_progress(reported, 50) == part


def test_a_steady_job_ends_when_its_speed_says() -> None:
    completion = Completion()
    for second in range(11):
        completion.note(second / 100, float(second))
    assert completion.part == 0.1
    assert completion.seconds_left(10.0) == pytest.approx(90.0)
    assert completion.seconds_left(15.0) == pytest.approx(85.0)
    completion.note(1.0, 16.0)
    assert completion.seconds_left(20.0) == 0.0


def test_without_two_different_readings_the_time_is_unknown() -> None:
    completion = Completion()
    assert (completion.part, completion.seconds_left(0.0)) == (None, None)
    for second in range(5):
        completion.note(0.5, float(second))
    assert (completion.part, completion.seconds_left(5.0)) == (0.5, None)


def test_progress_that_rises_once_per_epoch_is_enough() -> None:
    completion = Completion()
    for second in range(300):
        completion.note(second // 100 / 10, float(second))
    assert completion.seconds_left(299.0) == pytest.approx(800.0 - 99.0)


def test_the_recent_speed_counts() -> None:
    completion = Completion()
    part, now = 0.0, 0.0
    for step in (0.001,) * 200 + (0.0001,) * (MOST_READINGS + 1):
        part, now = part + step, now + 1.0
        completion.note(part, now)
    assert completion.seconds_left(now) == pytest.approx((1 - part) / 0.0001, rel=0.01)


def test_progress_that_falls_starts_over_and_a_job_that_reports_none_has_none() -> None:
    completion = Completion()
    for second in range(10):
        completion.note(second / 10, float(second))
    completion.note(0.0, 10.0)
    assert completion.seconds_left(10.0) is None
    completion.note(0.5, 11.0)
    assert completion.seconds_left(11.0) == pytest.approx(1.0)
    completion.note(None, 12.0)
    assert (completion.part, completion.seconds_left(12.0)) == (None, None)


def test_the_rate_is_the_recent_steps_per_second() -> None:
    rate = StepRate()
    for second in range(20):
        rate.note(10 * second, float(second))
    assert rate.rate == 10.0
    for second in range(20, 40):
        rate.note(200 + 2 * (second - 20), float(second))
    assert rate.rate == 2.0


def test_a_job_that_resumes_does_not_leap() -> None:
    rate = StepRate()
    rate.note(0, 0.0)
    rate.note(0, RATE_WINDOW_SECONDS)
    rate.note(10_000, 2 * RATE_WINDOW_SECONDS)
    assert rate.rate == 0.0
    rate.note(10_030, 3 * RATE_WINDOW_SECONDS)
    assert rate.rate == 30 / RATE_WINDOW_SECONDS


def test_a_rate_is_never_negative_after_a_restart() -> None:
    rate = StepRate()
    rate.note(10_000, 0.0)
    rate.note(20_000, RATE_WINDOW_SECONDS)
    rate.note(0, 2 * RATE_WINDOW_SECONDS)
    assert rate.rate == 0.0
    rate.note(30, 3 * RATE_WINDOW_SECONDS)
    rate.note(60, 4 * RATE_WINDOW_SECONDS)
    assert rate.rate == 30 / RATE_WINDOW_SECONDS
