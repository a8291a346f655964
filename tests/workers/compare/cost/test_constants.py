"""A calibration's constants, in memory and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.calibrate.peer import link_of
from hubring.workers.compare.cost.model import exchange_terms
from hubring.workers.compare.cost.model.constants import read
from hubring.workers.compare.experiment.setting import Link
from hubring.workers.compare.hardship import network
from tests.support.compare.calibration import CONSTANTS, WIRE


def test_a_link_is_what_the_wire_takes_longer_than_within_the_host() -> None:
    seen = link_of(WIRE, [3e-4, 1e-4 + 5e-5, 9e-5], [8 / 1e9 * 1514 / 1448] * 3)
    assert seen.rate == pytest.approx(1e9)
    assert seen.latency == pytest.approx(5e-5)
    assert link_of(WIRE, [9e-5], [1.1e-9]) == Link()


def test_constants_are_the_same_after_a_file(tmp_path: Path) -> None:
    linked = replace(CONSTANTS, link=Link(rate=1e10, latency=2e-5))
    linked.write(tmp_path / "new" / "calibration.json")
    assert read(tmp_path / "new" / "calibration.json") == linked


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"wires": {}}'])
def test_a_file_that_is_no_calibration_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"calibration\.json is not a calibration .*ps-compare calibrate"):
        read(file)


def test_what_was_not_measured_is_named_with_what_was() -> None:
    with pytest.raises(UsageError, match="no wire 'rdma', only shm, zmq"):
        CONSTANTS.wire("rdma")
    with pytest.raises(UsageError, match="no optimizer 'Lion'; expected one of sgd, adam"):
        CONSTANTS.step("Lion")


def test_the_burst_of_an_emulated_link_is_the_one_that_is_set() -> None:
    assert exchange_terms.BURST_BYTES == network.BURST_BYTES
