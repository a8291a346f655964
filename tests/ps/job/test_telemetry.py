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
    found = from_proto(pb.Telemetry(metrics=metrics, progress=math.inf, gpu_use=2.0))
    assert len(found.metrics) == MOST_METRICS
    assert {len(name) for name in found.metrics} == {LONGEST_METRIC_NAME}
    assert (found.progress, found.gpu_use) == (None, None)


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


STEADY = [(second / 100, float(second)) for second in range(11)]
STOPPED = [(0.5, float(second)) for second in range(5)]
BY_EPOCH = [(second // 100 / 10, float(second)) for second in range(300)]
SLOWER = [(step / 1000, float(step)) for step in range(200)]
SLOWER += [(0.2 + step / 10_000, 200.0 + step) for step in range(MOST_READINGS + 1)]


@pytest.mark.parametrize(
    ("readings", "now", "part", "left"),
    [
        ([], 0.0, None, None),
        (STEADY, 10.0, 0.1, 90.0),
        (STEADY, 15.0, 0.1, 85.0),
        ([*STEADY, (1.0, 16.0)], 20.0, 1.0, 0.0),
        (STOPPED, 5.0, 0.5, None),  # no two different readings
        (BY_EPOCH, 299.0, 0.2, 800.0 - 99.0),
        (SLOWER, 260.0, 0.206, 7940.0),  # the recent speed counts
        ([*STEADY, (0.0, 11.0)], 11.0, 0.0, None),  # progress that falls starts over
        ([*STEADY, (0.0, 11.0), (0.5, 12.0)], 12.0, 0.5, 1.0),
        ([*STEADY, (None, 11.0)], 11.0, None, None),
    ],
)
def test_the_time_that_is_left_follows_from_the_recent_speed(
    readings: list[tuple[float | None, float]], now: float, part: float | None, left: float | None
) -> None:
    completion = Completion()
    for reading, at in readings:
        completion.note(reading, at)
    assert completion.part == pytest.approx(part)
    assert completion.seconds_left(now) == pytest.approx(left)


WINDOW = RATE_WINDOW_SECONDS


@pytest.mark.parametrize(
    ("reports", "rate"),
    [
        ([(10 * second, second) for second in range(20)], 10.0),
        ([*((10 * at, at) for at in range(20)), *((160 + 2 * at, at) for at in range(20, 40))], 2.0),
        ([(0, 0.0), (0, WINDOW), (10_000, 2 * WINDOW)], 0.0),  # a job that resumes does not leap
        ([(0, 0.0), (0, WINDOW), (10_000, 2 * WINDOW), (10_030, 3 * WINDOW)], 30 / WINDOW),
        ([(10_000, 0.0), (20_000, WINDOW), (0, 2 * WINDOW)], 0.0),  # never negative after a restart
        (
            [(10_000, 0.0), (20_000, WINDOW), (0, 2 * WINDOW), (30, 3 * WINDOW), (60, 4 * WINDOW)],
            30 / WINDOW,
        ),
    ],
)
def test_the_rate_is_the_recent_steps_per_second(reports: list[tuple[int, float]], rate: float) -> None:
    measured = StepRate()
    for step, now in reports:
        measured.note(step, now)
    assert measured.rate == rate
