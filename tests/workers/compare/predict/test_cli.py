"""`ps-compare calibrate` and `ps-compare predict`, as a user meets them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from msgspec.structs import replace

from hubring.ps.config import terminal
from hubring.workers.bench import job
from hubring.workers.compare import cli
from hubring.workers.compare.plan.experiment_file import load_experiment
from hubring.workers.compare.plan.setting import Link
from hubring.workers.compare.predict import calibrate, question
from hubring.workers.compare.predict.calibrations import BUNDLED, WIRES, read_constants
from hubring.workers.compare.predict.prediction import NCCL, SCORED
from tests.support.compare.calibration import CONSTANTS, output
from tests.support.compare.matrix import COMMON, GROUPS, OUTSIDE
from tests.support.processes.cluster import Cluster

Told = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs `ps-compare`; returns the exit code, the last line, and what a person reads."""

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        with pytest.raises(SystemExit) as ended:
            terminal.run(cli.app, "ps-compare", words)
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, json.loads(said.out.splitlines()[-1]), said.err

    return run


@pytest.fixture
def calibrated(tmp_path: Path) -> str:
    CONSTANTS.write(tmp_path / "new" / "calibration.json")
    return str(tmp_path / "new" / "calibration.json")


@pytest.fixture
def predicted(told: Told, calibrated: str) -> Told:
    """Predicts with the calibration of this machine."""
    return partial(told, "predict", "--calibration", calibrated)


def test_predict_tells_steps_and_where_the_hub_wins(predicted: Told) -> None:
    asked = "--workers 4,8 --servers 1,8 --rate 10gbit --latency 20us --model-bytes 100000000"
    code, last, shown = predicted(*asked.split(), "--compute", "50ms", "--slice-bytes", "65536")
    assert code == 0
    rows = [(each["workers"], each["row"], each["servers"]) for each in last["predictions"]]
    assert rows[:4] == [(1, "local", None), (4, "ring", None), (4, "hub-bsp", 1), (4, "hub-bsp", 8)]
    assert len(rows) == 1 + 2 * (1 + 3 * 2)
    assert [each["workers"] for each in last["crossover"]] == [4, 8]
    crossover = "4 workers: by bytes alone hub-bsp is faster than the ring with 3 or more servers, by this"
    assert crossover in " ".join(shown.split())


def test_predict_tells_by_which_calibration(predicted: Told, calibrated: str) -> None:
    _, last, shown = predicted("--workers", "2")
    told = {"date": CONSTANTS.date, "cores": 2, "machine": {"cores": 2}}
    assert last["calibration"] == told | {"file": calibrated, "bundled": False}
    assert f"calibration: {calibrated}, measured {CONSTANTS.date} on" in shown


def test_predict_measures_only_if_asked_leaves_no_file_and_finds_the_one_of_the_folder(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "calibrate", lambda report: CONSTANTS)
    _, last, shown = told("predict", "--workers", "2", "--calibrate")
    assert (last["calibration"]["file"], last["calibration"]["bundled"]) == (None, False)
    assert "calibration: measured now on" in shown
    monkeypatch.delattr(calibrate, "calibrate")
    _, last, shown = told("predict", "--workers", "2")
    assert (last["calibration"]["file"], last["calibration"]["bundled"]) == ("host", True)
    assert "add --calibrate to measure it" in shown
    assert list(tmp_path.iterdir()) == []
    CONSTANTS.write(tmp_path / "calibration.json")
    _, last, _ = told("predict", "--workers", "2")
    assert last["calibration"]["file"] == "calibration.json"


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_calibration_answers(told: Told, name: str) -> None:
    asked = ["--calibration", name, "--workers", "8,64", "--model-bytes", "1000000000", "--batch", "32"]
    code, last, shown = told("predict", *asked)
    assert (code, last["calibration"]["bundled"]) == (0, True)
    assert name in shown
    assert "samples/s" in shown
    for each in last["predictions"]:
        samples = each["step_ms"] / 1e3 * each["samples_per_second"]
        assert samples == pytest.approx(each["workers"] * 32, rel=0.01)


def test_a_cluster_names_its_sources_and_the_rows_that_it_leaves_out(told: Told) -> None:
    asked = ["predict", "--calibration", "h100", "--workers", "16", "--model-bytes", "1000000000"]
    _, last, shown = told(*asked)
    assert last["calibration"]["cluster"] == "h100"
    assert "machine" not in last["calibration"]
    assert "from https://github.com/" in shown
    assert "ring and hub-bsp are not shown" in shown
    _, last, shown = told(*asked, "--rows", "ring,hub-bsp")
    assert last["crossover"][0]["by_bytes"] is None
    assert "by bytes alone hub-bsp is faster than the ring with no number of servers" in shown
    assert "not shown" not in shown


def test_rows_that_could_be_on_nccl_say_that_they_are_predicted_on_gloo(told: Told) -> None:
    asked = ["predict", "--calibration", "h100", "--workers", "16", "--model-bytes", "1000000000"]
    _, last, shown = told(*asked, "--rows", "ring,ddp,fsdp2,zero1,mpi,nccl,hub-bsp")
    assert [each["row"] for each in last["predictions"]][:3] == ["ring", "ddp", "fsdp2"]
    named = {word for line in shown.splitlines() for word in line.split()[1:2] if "(Gloo)" in line}
    assert named == {"ring", "ddp", "fsdp2", "zero1"}


def test_the_output_of_nccl_tests_is_a_calibration(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    file.write_text(output(1, 8, 100e9) + output(4, 8, 40e9))
    asked = ["--calibration", str(file), "--workers", "8,32", "--model-bytes", str(1 << 28)]
    _, last, shown = told("predict", *asked, "--rows", "nccl")
    found = [(each["busbw"], each["by"], each["extrapolated"]) for each in last["predictions"]]
    assert found == [(pytest.approx(speed, rel=0.01), "sweep", False) for speed in (100, 40)]
    assert last["crossover"] == []
    assert "busbw GB/s" in shown


def test_nodes_of_gpus_can_be_described(predicted: Told) -> None:
    asked = "--gpus-per-node 4 --intra 800gbit --rate 100gbit --workers 4,16 --rows nccl,hub-bsp"
    _, last, shown = predicted(*asked.split(), "--model-bytes", "1000000000")
    within, _, between, _ = last["predictions"]
    assert within["bound"] == "inside node"
    assert between["bound"] == "link"
    assert within["busbw"] > 4 * between["busbw"]
    assert within["extrapolated"]
    assert "* extrapolated: no sweep has as many nodes and GPUs" in shown


def test_an_extrapolation_is_marked_and_a_host_limit_is_not_called_a_link(predicted: Told) -> None:
    asked = "--rate 400gbit --workers 4 --rows ring --model-bytes 100000000"
    _, last, shown = predicted(*asked.split())
    (found,) = last["predictions"]
    assert (found["bound"], found["extrapolated"]) == ("I/O thread", True)
    assert "* extrapolated: the link is faster than what this calibration reached" in shown
    assert "I/O thread: not the link but the calibrated host" in shown


def test_predict_tells_samples_a_second_only_of_a_batch(predicted: Told) -> None:
    _, last, shown = predicted("--workers", "2", "--rows", "ring,hub-backup")
    assert last["predictions"][0]["samples_per_second"] is None
    assert "samples/s" not in shown


def test_link_values_not_given_are_the_calibrations(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "linked.json"
    replace(CONSTANTS, link=Link(rate=1e9, latency=1e-3)).write(file)

    def step(*words: str) -> float:
        asked = ["--workers", "4", "--rows", "ring", "--model-bytes", "100000000", *words]
        _, last, _ = told("predict", "--calibration", str(file), *asked)
        seconds: float = last["predictions"][0]["step_ms"] / 1e3
        return seconds

    assert step("--latency", "3ms") - step() == pytest.approx(8e-3)  # there and back in each of two passes
    assert step("--rate", "1gbit") == pytest.approx(step())


def test_random_delays_are_simulated_with_five_seeds(predicted: Told) -> None:
    slow = "--straggler pareto:50ms --straggler-shape 1.5 --steps 20"
    _, last, shown = predicted("--workers", "4", "--rows", "hub-bsp,hub-asp", *slow.split())
    for each in last["predictions"]:
        low, high = each["range_ms"]
        assert low < each["step_ms"] < high
    assert "of the seeds" in shown


def test_slow_ranks_that_a_setting_lacks_slow_nothing(predicted: Told) -> None:
    asked = ("--rows", "ring", "--workers", "2,4")
    _, calm, _ = predicted(*asked)
    _, slow, _ = predicted(*asked, "--straggler", "1", "--straggler-ranks", "2")
    pairs = zip(slow["predictions"], calm["predictions"], strict=True)
    assert [one["step_ms"] > other["step_ms"] for one, other in pairs] == [False, True]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--workers", "4,none"), "--workers 4,none: expected comma-separated numbers from 1"),
        (("--straggler", "sometimes:1"), "--straggler sometimes:1: expected"),
        (("--straggler", "1", "--straggler-ranks", "first"), "ranks first: expected a whole number"),
        (("--straggler-ranks", "1"), "--straggler-ranks 1: the delay is missing; add --straggler"),
        (("--workers", "4", "--straggler", "1", "--straggler-ranks", "4"), "expected a rank from 0 to 3"),
        (("--straggler-shape", "2"), "--straggler-shape 2.0: the delay is missing; add --straggler"),
        (("--straggler", "host:1", "--straggler-shape", "2"), "only a pareto delay has a shape, not host"),
        (("--seeds", "4"), "Invalid value for '--seeds'"),
        (("--rows", "nccl"), "the calibration has no GPUs; for rows of nccl use `--calibration h100`"),
        (("--intra", "copper"), "--intra copper: expected nvlink, pcie, or a rate such as 900gbit"),
        (("--gpus-per-node", "8", "--workers", "12", "--rows", "nccl"), "expected a multiple of 8, or fewer"),
        (("--calibrate",), "exclude each other; use one of them"),
        (("--batch", "0"), "Invalid value for '--batch'"),
        (("--job", "gpt"), "--job gpt: expected one of digits"),
        (("--job", "digits", "--model-bytes", "5"), "use one of them"),
        (("--rate", "fast"), "fast"),
        (("--rows", "gossip"), "no model of row 'gossip'"),
        (("--rows", "ring,ring"), "--rows = ring, ring has a duplicate; remove it"),
        (("--workers", "2,02"), "--workers = 2, 2 has a duplicate; remove it"),
        (("--rows", "ring-powersgd:4"), "no model of --compress powersgd:4, whose size depends"),
        (("--workers", "1", "--rows", "hub-backup"), "hub-backup needs at least 2 workers, not 1; pass"),
        (("--transport", "rdma"), "no wire 'rdma', only shm, zmq"),
        (("--optimizer", "lion"), "no optimizer 'lion'; expected one of sgd, adam"),
        (("--calibration", "nowhere.json"), "nowhere.json is not a calibration"),
    ],
)
def test_a_question_that_means_nothing_is_answered_by_what_was_allowed(
    predicted: Told, words: tuple[str, ...], says: str
) -> None:
    code, last, shown = predicted(*words)
    assert code == 2
    assert says in last["error"]
    assert says in shown


@pytest.mark.parametrize("name", question.MODELS)
def test_models_are_as_large_as_the_bench_s(name: str) -> None:
    assert question.MODELS[name] == job.shape_bytes(name, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["0.0.0.0"], "--serve 0.0.0.0 is open to other machines without credentials; add --insecure"),
        (["127.0.0.1", "--job", "digits"], "--serve measures nothing, so it excludes --job"),
    ],
)
def test_a_shard_is_served_alone_and_to_everybody_only_if_asked(
    told: Told, words: list[str], says: str
) -> None:
    code, last, _ = told("calibrate", "--serve", *words)
    assert code == 2
    assert says in last["error"]


@pytest.fixture
def peer(cluster: Cluster) -> Iterator[str]:
    """The address of another host, as far as this one knows."""
    serving = cluster.run("serving", "hubring.workers.compare.cli", "calibrate", "--serve", "127.0.0.1")
    serving.until(lambda: serving.said().endswith("\n"), "address")
    yield serving.said().splitlines()[0].split()[-1]
    serving.process.send_signal(signal.SIGINT)
    assert serving.done(130)["error"] == "interrupted"


@pytest.mark.slow
@pytest.mark.full
def test_calibrate_measures_every_wire_and_shows_its_spread(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    monkeypatch.setattr(calibrate, "SMALL_TIMES", 10)
    out = tmp_path / "calibration.json"
    code, last, shown = told("calibrate", "--out", str(out), "--turns", "3", "--peer", peer)
    assert (code, last["calibration"]) == (0, str(out))
    constants = read_constants(out)
    assert set(constants.wires) == set(WIRES)
    assert all(wire.alpha > 0 for wire in constants.wires.values())
    assert all(constants.wires[name].beta > 0 and constants.wires[name].cpu > 0 for name in WIRES[1:])
    assert min(constants.copy, constants.serve, *constants.apply.values()) > 0
    assert all(low <= high for low, high in constants.spread.values())
    assert constants.link is not None
    assert constants.machine["cores"] == constants.cores
    assert "zmq.alpha" in shown


def test_rows_whose_error_nobody_measured_are_marked_beside_their_number(told: Told) -> None:
    _, last, shown = told("predict", "--workers", "4", "--rows", "ring,hub-colocated,hub-bsp,fsdp2")
    assert [each["scored"] for each in last["predictions"]] == [True, False, True, False]
    marked = [line.split()[1] for line in shown.splitlines() if "ms" not in line and " not scored " in line]
    assert marked == ["hub-colocated", "fsdp2"]
    assert "not scored: the error of this row's predictions was not measured on any machine" in shown
    _, _, shown = told("predict", "--workers", "4", "--rows", "ring,hub-bsp,hub-asp")
    assert "not scored" not in shown


def test_the_rows_that_count_as_scored_are_those_of_the_matrix() -> None:
    rows = {row for group in GROUPS for each in group.experiments for row in each.get("rows", COMMON["rows"])}
    assert rows == {row for row in SCORED if row not in NCCL}


def test_a_group_outside_the_matrix_makes_twelve_predictions(tmp_path: Path) -> None:
    file, keys = tmp_path / "outside.toml", []
    for each in OUTSIDE.experiments:
        file.write_text(tomli_w.dumps({**COMMON, **each}))
        keys.append(load_experiment(str(file), {}).settings)
    matrix = {each["workers"] for group in GROUPS for each in group.experiments}
    assert not matrix & {each.workers for settings in keys for each in settings}
    (rows,) = {tuple(each["rows"]) for each in OUTSIDE.experiments}
    # Each row's first setting calibrates it.
    assert (sum(map(len, keys)) - 1) * len(rows) == 12
