"""A switch's buffer that cannot hold what all send at once makes an exchange late."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hubring.workers.compare.cost.model import incast
from hubring.workers.compare.cost.prediction import predict
from hubring.workers.compare.experiment.setting import Link
from tests.support.compare.calibration import CONSTANTS, JOB, LINKED

MEBI = 1 << 20


@pytest.mark.parametrize(
    ("workers", "nbytes", "buffer"), [(1, 100 * MEBI, 1500), (4, MEBI, 4 * MEBI), (4, 100 * MEBI, 16 * MEBI)]
)
def test_what_fits_costs_nothing(workers: int, nbytes: int, buffer: int) -> None:
    assert incast.delay(workers, nbytes, 1e9, 0.0, buffer) == 0.0


def test_a_buffer_that_overflows_costs_half_its_time() -> None:
    assert incast.delay(4, MEBI, 200e6, 0.0, 2.5e6) == pytest.approx(0.05)


def test_a_worker_that_loses_its_window_waits_for_the_timer() -> None:
    assert incast.delay(64, MEBI, 1e9, 0.0, 64_000) > incast.TIMER
    assert incast.delay(64, MEBI, 1e9, 10e-3, 64_000) < incast.TIMER, "a long line holds segments as well"


def test_what_was_measured_with_a_switch_that_drops_is_predicted() -> None:
    def step(row: str, buffer: float | None) -> float:
        job = replace(JOB, compute=0.0, model_bytes=MEBI, buffer=buffer)
        return predict(CONSTANTS, row, replace(LINKED, link=Link(rate=2e8)), job).step_seconds

    assert step("hub-bsp", 2.5e6) / step("hub-bsp", None) == pytest.approx(1.12, abs=0.05)
    assert step("ring", 3e4) == step("ring", None), "in a ring each host receives from one other"
