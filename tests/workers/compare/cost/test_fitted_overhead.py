"""What a step takes beyond the model is divided into what grows with links and what does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hubring.workers.compare.cost.fitted_overhead import Overhead
from hubring.workers.compare.cost.prediction import Job, predict
from hubring.workers.compare.cost.score import Score
from hubring.workers.compare.experiment.setting import Link, Setting
from hubring.workers.compare.result.findings import Accuracy, Findings
from tests.support.compare.calibration import CONSTANTS, LINKED
from tests.support.compare.modelled import APART, THEIRS, entry, findings, rounded, score


def test_overhead_is_split_by_what_a_process_alone_takes() -> None:
    # alone = fixed + batch = 10; four workers on two cores: 2 (fixed + batch / 4) = 8
    solved = Overhead.solve(8.0, 4, 2, 10.0)
    assert solved.fixed == pytest.approx(2.0)
    assert solved.batch == pytest.approx(8.0)
    assert solved.of(4) == pytest.approx(8.0)
    assert solved.of(8) == pytest.approx(4 * (2 + 1))


SERVERS = [Setting(workers=4, servers=k, link=Link(rate=2e8)) for k in (1, 2, 4)]


def behind_links(
    row: str, longer: float = 1.0, *, more: float = 0.0, told: bool = True, job: Job = THEIRS
) -> Findings:
    """What a row measures whose computing takes 50 ms, and whose exchange `longer` than the formula says.

    `more`: seconds on top, the same behind any number of servers. `told`: its workers say how long they
    computed.
    """
    known = job.compute
    steps = [
        known + more + longer * (predict(CONSTANTS, row, setting, job).step_seconds - known)
        for setting in SERVERS
    ]
    rows = [
        entry(row, setting, step, compute=known if told else None)
        for setting, step in zip(SERVERS, steps, strict=True)
    ]
    return findings(SERVERS, rows)


def test_what_the_wire_takes_longer_with_one_server_is_not_added_with_four() -> None:
    told, untold = (
        score(behind_links("hub-bsp", 1.15, told=known, job=APART), APART).predictions()
        for known in (True, False)
    )
    # The formula's own, and nothing on top of it.
    assert all(-0.14 < (each.error or 0.0) < 0 for each in told)
    assert (untold[-1].error or 0.0) > 0.2  # as it is where nobody tells computing from exchanging


def test_what_one_machine_s_cores_do_for_all_links_stays_with_any_number_of_servers() -> None:
    left = behind_links("hub-bsp", more=0.1)
    predictions = score(left).predictions()
    assert [each.error for each in predictions] == pytest.approx([0.0] * 3, abs=1e-9)


def test_waiting_in_a_server_s_line_is_not_taken_for_computing() -> None:
    accuracy = Score.accuracy(score(behind_links("hub-asp")).predictions())
    assert rounded(accuracy) == Accuracy(0.0, 2)


def test_what_is_left_of_a_step_is_divided_as_the_exchange_is() -> None:
    assert Overhead.rest(1.0, 0.7, computing=0.5, links=1.0) == pytest.approx(0.5)
    assert Overhead.rest(1.0, 0.7, computing=0.5, links=0.0) == pytest.approx(0.8)
    assert Overhead.rest(1.0, 0.7, computing=0.5, links=0.5) == pytest.approx(0.65)
    assert Overhead.rest(1.0, 0.2, computing=None, links=1.0) == pytest.approx(0.8)


def test_emulated_computing_is_no_overhead() -> None:
    slept = replace(LINKED, compute=0.2)
    steps = {k: predict(CONSTANTS, "hub-bsp", replace(slept, servers=k), THEIRS).step_seconds for k in (1, 4)}
    rows = [entry("hub-bsp", replace(slept, servers=k), step, compute=0.25) for k, step in steps.items()]
    found = findings([replace(slept, servers=k) for k in steps], rows)
    assert rounded(Score.accuracy(score(found).predictions())) == Accuracy(0.0, 1)


def test_overhead_is_never_negative() -> None:
    assert Overhead.solve(-1.0, 4, 2, None).of(4) == 0.0
    assert Overhead.solve(8.0, 4, 2, 0.1).batch == 0.0
