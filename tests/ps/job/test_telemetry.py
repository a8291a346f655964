"""What workers report is bounded and finite, whatever a script or a peer sends."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.job.telemetry import (
    LONGEST_NAME,
    MOST_METRICS,
    Exporter,
    Telemetry,
    from_proto,
    progress,
    shown,
)


def test_it_is_the_same_after_the_wire() -> None:
    sent = Telemetry({"accuracy": 0.5, "lr": 0.1}, 640, 0.25, 1.5, 1 << 30, 1 << 31)
    assert from_proto(sent.to_proto()) == sent
    assert from_proto(Telemetry().to_proto()) == Telemetry()


def test_only_finite_numbers_without_a_place_of_their_own_are_shown() -> None:
    reported = {
        "loss": 1.0,
        "samples": 32,
        "progress": 0.5,
        "total_steps": 100,
        "accuracy": 0.5,
        "epoch": 3,
        "name": "resnet",
        "best": True,
        "nan": math.nan,
        "inf": math.inf,
        "huge": 10**400,
        "none": None,
    }
    assert shown(reported.items()) == {"accuracy": 0.5, "epoch": 3.0}


def test_what_cannot_be_sent_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def replaced() -> Telemetry:
        raise AttributeError("the script replaced param_groups")

    exporter = Exporter()
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
    assert {len(name) for name in found.metrics} == {LONGEST_NAME}
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
    assert progress(reported, 50) == part
