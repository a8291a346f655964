"""Predictions of rows, and their score beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.calibrate.peer import link_of
from hubring.workers.compare.cost.measured import model_bytes, points
from hubring.workers.compare.cost.model.constants import Constants, Wire, read
from hubring.workers.compare.cost.overhead import Overhead
from hubring.workers.compare.cost.prediction import Job, predict
from hubring.workers.compare.cost.reading import read as reading_of
from hubring.workers.compare.cost.score import Score
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.row import ROWS, Row
from hubring.workers.compare.experiment.setting import Fault, Link, Setting
from hubring.workers.compare.judge.predictions import predicted as predicted_of
from hubring.workers.compare.result.findings import Accuracy, Entry, Findings, Gate, Number
from hubring.workers.slowdown.straggler import Straggler

WIRE = Wire(alpha=1e-4, beta=1e-9, cpu=0.5e-9)
CONSTANTS = Constants(
    wires=dict.fromkeys(("shm", "zmq", "grpc", "gloo"), WIRE),
    copy=1e-10,
    reduce=1e-10,
    apply={"sgd": 2e-10, "adam": 4e-10},
    serve=5e-5,
    cores=2,
    spread={"copy": (0.9e-10, 1.2e-10)},
    machine={"cores": 2},
    date="2026-11-21T12:00:00+00:00",
)
JOB = Job(model_bytes=40 << 20, compute=0.1, batch=32)
LINKED = Setting(workers=4, servers=1, link=Link(rate=1e9))


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
    with pytest.raises(UsageError, match=r"calibration\.json holds no calibration .*ps-compare calibrate"):
        read(file)


def test_what_was_not_measured_is_named_with_what_was() -> None:
    with pytest.raises(UsageError, match="no wire 'rdma'; it has shm, zmq"):
        CONSTANTS.wire("rdma")
    with pytest.raises(UsageError, match="no optimizer 'Lion'; it has sgd, adam"):
        CONSTANTS.step("Lion")


@pytest.mark.parametrize("row", [*ROWS, "hub-zmq", "hub-grpc", "ddp", "mpi", "rpc"])
def test_every_row_has_a_model(row: str) -> None:
    predicted = predict(CONSTANTS, row, LINKED, JOB)
    assert predicted.step_seconds >= JOB.compute
    assert predicted.by == "formula"


def test_a_row_without_a_model_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(UsageError, match="no model of a row 'gossip'; there is one of local, ring"):
        predict(CONSTANTS, "gossip", LINKED, JOB)


def test_a_row_is_read_from_what_its_programs_are_told() -> None:
    ssp = reading_of("hub-ssp")
    assert (ssp.rule, ssp.staleness, ssp.steps) == ("ssp", 2, True)
    assert not reading_of("hub-aggregate").steps
    near = Row("near", "", ("--mode", "bsp", "--colocate"))
    assert predict(CONSTANTS, near, LINKED, JOB).bound == "link"
    spare = Row("mine", "", ("--mode", "backup", "--backup", "3"), ("--transport", "grpc"))
    assert (reading_of(spare).rule, reading_of(spare).backup, reading_of(spare).wire) == ("backup", 3, "grpc")


@pytest.mark.parametrize(
    "more", [{"straggler": Straggler(kind="pareto", seconds=0.02)}, {"fault": Fault(rank=1, step=10)}]
)
def test_what_is_not_alike_is_simulated(more: dict[str, Any]) -> None:
    setting = replace(LINKED, **more)
    assert predict(CONSTANTS, "hub-asp", setting, JOB).by == "simulation"


def test_stragglers_cost_lockstep_more_than_others() -> None:
    slow = replace(LINKED, servers=4, straggler=Straggler(kind="pareto", seconds=0.2))

    def speed(row: str) -> float:
        found = predict(CONSTANTS, row, slow, JOB).samples_per_second
        assert found is not None
        return found

    assert speed("hub-bsp") < speed("hub-ssp") < speed("hub-asp")


def test_a_process_alone_computes_for_all() -> None:
    calm, computing = (
        predict(CONSTANTS, "local", Setting(workers=4, compute=compute), JOB).step_seconds
        for compute in (None, 0.01)
    )
    assert computing - calm == pytest.approx(0.04)


def test_a_ring_does_not_outlive_a_loss_and_a_lone_process_knows_of_none() -> None:
    lossy = replace(LINKED, fault=Fault(rank=1, step=10))
    assert not predict(CONSTANTS, "ring", lossy, JOB).finished
    assert predict(CONSTANTS, "hub-bsp", lossy, JOB).finished
    assert predict(CONSTANTS, "local", lossy, JOB) == predict(CONSTANTS, "local", LINKED, JOB)
    with pytest.raises(UsageError, match="nobody is left"):
        predict(CONSTANTS, "hub-bsp", Setting(workers=1, fault=Fault(rank=0, step=1)), JOB)


def test_an_exchange_hides_behind_backward_but_for_its_last_slice() -> None:
    shown = predict(CONSTANTS, "hub-bsp", LINKED, replace(JOB, slice_bytes=1 << 20))
    hidden = predict(CONSTANTS, "hub-bsp", LINKED, replace(JOB, slice_bytes=1 << 20, overlap=0.5))
    assert shown.step_seconds - hidden.step_seconds == pytest.approx(0.05)


def test_the_links_part_is_of_the_exchange_whatever_overlaps_it() -> None:
    predicted = predict(CONSTANTS, "hub-bsp", LINKED, JOB)
    parts = predicted.parts | {"link": 0.3, "server": 0.3, "cores": 0.3}
    assert replace(predicted, parts=parts, exchange=0.4).links == pytest.approx(0.75)
    assert replace(predicted, parts=parts, exchange=0.2).links == 1
    assert predict(CONSTANTS, "local", LINKED, JOB).links == 0
    assert predicted.exchange == pytest.approx(predicted.step_seconds - JOB.compute)


def test_efficiency_is_the_part_that_computes() -> None:
    predicted = predict(CONSTANTS, "ring", LINKED, JOB)
    assert predicted.efficiency == pytest.approx(0.1 / predicted.step_seconds)
    assert predicted.samples_per_second == pytest.approx(4 * 32 / predicted.step_seconds)
    assert predicted.bound == "link"


# The score.


def number(value: float) -> Number:
    return Number([value], value, 0.0, 0.0)


def entry(
    name: str, setting: Setting, seconds: float, batch: float = 128, compute: float | None = None
) -> Entry:
    sent = (40 << 20) * (1.5 if name == "ring" else 1.0)
    numbers = {"step_ms": 1e3 * seconds, "samples_per_second": batch / seconds, "bytes_sent_per_step": sent}
    numbers |= {} if compute is None else {"compute_ms": 1e3 * compute}
    told = {name: number(value) for name, value in numbers.items()}
    return Entry(setting=setting.key, row=name, synchronous=True, numbers={**told})


def findings(settings: Sequence[Setting], rows: Sequence[Entry], **asked: Any) -> Findings:
    experiment = Experiment(**({"job": "digits"} | asked))
    return Findings(
        command="",
        asked=experiment,
        job=experiment.yardstick,
        machine={},
        settings=list(settings),
        gate=Gate(passed=True, tolerance=1e-4),
        rows=list(rows),
    )


def score(found: Findings, job: Job | None = None) -> Score:
    return Score(found.settings, found.rows, CONSTANTS, job or THEIRS)


THEIRS = Job(model_bytes=40 << 20, compute=0.05, together=True)
FINE = replace(THEIRS, slice_bytes=1 << 19)
APART = replace(THEIRS, together=False)
"""The same with every host on a machine of its own."""


def experiment(job: Job = THEIRS, wrong: float = 1.0) -> Findings:
    """What the model itself would measure, if all but the first setting took `wrong` times as long."""
    links = [replace(LINKED, servers=k, link=Link(rate=rate)) for rate in (1e9, 2e8) for k in (1, 2, 4)]
    rows = [
        entry(row, setting, predict(CONSTANTS, row, setting, job).step_seconds * (wrong if place else 1))
        for place, setting in enumerate(links)
        for row in ("ring", "hub-bsp")
        if row == "hub-bsp" or setting.servers == 1
    ]
    return findings(links, rows, slice_bytes=job.slice_bytes)


def rounded(accuracy: Accuracy | None) -> Accuracy:
    assert accuracy is not None
    return replace(accuracy, mean_error=round(accuracy.mean_error, 9))


def listed(found: Findings) -> Findings:
    """The same as an experiment lists it: a ring's run in every setting that differs in servers alone."""
    rings = [row for row in found.rows if row.row == "ring"]
    again = [
        replace(row, setting=row.setting.replace("k1", f"k{servers}")) for row in rings for servers in (2, 4)
    ]
    return replace(found, rows=[*found.rows, *again])


def test_the_model_size_is_what_a_worker_sends() -> None:
    found = experiment()
    assert model_bytes(found.settings, found.rows) == 40 << 20
    assert model_bytes(found.settings, [row for row in found.rows if row.row != "ring"]) == 40 << 20
    assert model_bytes(found.settings, []) is None


def test_only_what_was_not_calibrated_on_counts() -> None:
    model = score(experiment())
    predictions = model.predictions()
    calibrated = [each for each in predictions if each.calibrated]
    assert {(each.row, each.setting) for each in calibrated} == {
        ("ring", "n4 k1 1000mbit"),
        ("hub-bsp", "n4 k1 1000mbit"),
    }
    assert rounded(model.accuracy(predictions)) == Accuracy(0.0, 6)


def test_a_run_that_counts_in_many_settings_is_scored_once() -> None:
    predictions = score(listed(experiment())).predictions()
    rings = [each.setting for each in predictions if each.row == "ring"]
    assert rings == ["n4 k1 1000mbit", "n4 k1 200mbit"]


def test_what_is_predicted_wrongly_is_said() -> None:
    predictions = score(experiment(wrong=1.25)).predictions()
    accuracy = Score.accuracy(predictions)
    assert accuracy is not None
    assert accuracy.mean_error == pytest.approx(0.2)
    assert {round(each.error or 0.0, 6) for each in predictions if not each.calibrated} == {-0.2}


@pytest.mark.parametrize(("job", "measured", "predicted"), [(FINE, 4, 3), (THEIRS, None, 5)])
def test_a_crossover_is_measured_and_predicted_side_by_side(
    job: Job, measured: int | None, predicted: int
) -> None:
    found = predicted_of(listed(experiment(job)), CONSTANTS).crossover
    assert [each.setting for each in found] == ["n4 1000mbit", "n4 200mbit"]
    for each in found:
        assert each.tried == [1, 2, 4]
        assert (each.measured, each.predicted, each.by_bytes) == (measured, predicted, 3)
        assert each.calibrated


def test_without_a_calibration_a_crossover_is_measured_only() -> None:
    first = predicted_of(listed(experiment(FINE)), None).crossover[0]
    assert (first.measured, first.predicted, first.calibrated) == (4, None, False)


def with_pauses(job: Job = THEIRS, workers: tuple[int, ...] = (2, 4, 8)) -> Findings:
    """What the model would measure with a straggler, by workers, where nobody ran without one."""
    slow = Straggler(kind="constant", seconds=0.02, ranks=(1,))
    settings = [Setting(workers=count, straggler=slow) for count in workers]
    rows = [
        entry(row, setting, predict(CONSTANTS, row, setting, job).step_seconds)
        for setting in settings
        for row in ("ring", "hub-bsp")
    ]
    return findings(settings, rows)


def test_what_was_measured_by_workers_is_there_though_nothing_calibrated_the_rows() -> None:
    found = predicted_of(with_pauses(), CONSTANTS)
    assert [(each.row, each.workers) for each in found.scaling] == [
        ("ring", [2, 4, 8]),
        ("hub-bsp", [2, 4, 8]),
    ]
    assert all(None not in each.measured for each in found.scaling)
    assert found.scaling == predicted_of(with_pauses(), None).scaling


def test_a_row_that_nothing_calibrated_is_neither_predicted_nor_scored() -> None:
    found = predicted_of(with_pauses(), CONSTANTS)
    assert (found.predictions, found.score) == ([], None)
    calm = Setting(workers=4)
    slow = with_pauses()
    ring = entry("ring", calm, predict(CONSTANTS, "ring", calm, THEIRS).step_seconds)
    both = replace(slow, settings=[*slow.settings, calm], rows=[*slow.rows, ring])
    found = predicted_of(both, CONSTANTS)
    assert {each.row for each in found.predictions} == {"ring"}
    assert found.score is not None
    assert found.score.settings == 3
    assert {each.row for each in found.scaling} == {"ring", "hub-bsp"}


def test_a_crossover_is_not_predicted_for_rows_that_nothing_calibrated() -> None:
    found, idle = listed(experiment(FINE)), Straggler(kind="constant", seconds=0.0)
    keys = {each.key: replace(each, straggler=idle) for each in found.settings}
    rows = [replace(each, setting=keys[each.setting].key) for each in found.rows]
    slowed = predicted_of(replace(found, settings=list(keys.values()), rows=rows), CONSTANTS)
    assert slowed.crossover
    for each in slowed.crossover:
        assert (each.predicted, each.calibrated) == (None, False)


@pytest.mark.parametrize("wire", ["zmq", "grpc"])
@pytest.mark.parametrize("link", [None, Link(rate=1e9)])
def test_a_prediction_is_for_the_wire_that_the_experiment_took(wire: str, link: Link | None) -> None:
    dear = replace(WIRE, beta=4e-8)
    constants = replace(CONSTANTS, wires={**CONSTANTS.wires, wire: dear})
    job = replace(THEIRS, wire=wire)
    settings = [Setting(workers=4, servers=count, link=link) for count in (1, 4)]
    rows = [
        entry("hub-bsp", setting, predict(constants, "hub-bsp", setting, job).step_seconds)
        for setting in settings
    ]
    found = predicted_of(findings(settings, rows, transport=wire), constants)
    assert rounded(found.score) == Accuracy(0.0, 1)


def test_a_shipped_job_is_predicted_with_the_optimizer_that_it_steps_with() -> None:
    slow = replace(CONSTANTS, apply={"sgd": 2e-10, "adam": 4e-8})
    settings = [Setting(workers=4, servers=count) for count in (1, 4)]
    job = replace(THEIRS, optimizer="adam")
    rows = [
        entry("hub-bsp", setting, predict(slow, "hub-bsp", setting, job).step_seconds) for setting in settings
    ]
    scores = {
        name: predicted_of(findings(settings, rows, job=name), slow).score for name in ("char-lm", "digits")
    }
    errors = {name: each.mean_error for name, each in scores.items() if each is not None}
    assert errors["char-lm"] == pytest.approx(0.0, abs=1e-9)
    assert errors["digits"] > 0.1


def test_scaling_has_what_was_measured_and_what_lies_beyond() -> None:
    ring = next(each for each in score(experiment()).scaling() if each.row == "ring")
    assert ring.workers == [1, 2, 4, 8, 16]
    assert [speed is not None for speed in ring.measured] == [False, False, True, False, False]
    assert ring.predicted[2] == pytest.approx(ring.measured[2])


def test_withheld_and_unknown_rows_are_left_out() -> None:
    found = experiment()
    first, second, third, *others = found.rows
    rows = [
        replace(first, withheld="wrong"),
        replace(second, row="gossip"),
        replace(third, numbers={**third.numbers, "step_ms": None}),
    ]
    assert len(points(found.settings, [*rows, *others])) == 5


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
