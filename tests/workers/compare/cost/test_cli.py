"""`ps-compare calibrate` and `ps-compare predict`, as a user meets them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hubring.ps.config import terminal
from hubring.workers.bench import shapes
from hubring.workers.compare import cli
from hubring.workers.compare.cost import question
from hubring.workers.compare.cost.calibrate import calibration
from hubring.workers.compare.cost.calibrations import BUNDLED
from hubring.workers.compare.cost.model.constants import WIRES, read
from hubring.workers.compare.experiment.setting import Link
from tests.support.compare.calibration import CONSTANTS
from tests.support.compare.nccl import output
from tests.support.processes.cluster import Cluster


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, last line, and what a person reads."""
    with pytest.raises(SystemExit) as ended:
        terminal.run(cli.app, "ps-compare", words)
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads(said.out.splitlines()[-1]), said.err


@pytest.fixture
def calibrated(tmp_path: Path) -> str:
    CONSTANTS.write(tmp_path / "calibration.json")
    return str(tmp_path / "calibration.json")


def test_predict_tells_steps_and_where_the_hub_wins(
    capsys: pytest.CaptureFixture[str], calibrated: str
) -> None:
    asked = ["--workers", "4,8", "--servers", "1,8", "--rate", "10gbit", "--latency", "20us"]
    model = ["--model-bytes", "100000000", "--compute", "50ms", "--slice-bytes", "65536"]
    code, last, shown = told(capsys, "predict", "--calibration", calibrated, *asked, *model)
    assert code == 0
    rows = [(each["workers"], each["row"], each["servers"]) for each in last["predictions"]]
    assert rows[:4] == [(1, "local", None), (4, "ring", None), (4, "hub-bsp", 1), (4, "hub-bsp", 8)]
    assert len(rows) == 1 + 2 * (1 + 3 * 2)
    assert [each["workers"] for each in last["crossover"]] == [4, 8]
    crossover = "4 workers: by bytes alone hub-bsp is faster than the ring with 3 or more servers, by this"
    assert crossover in " ".join(shown.split())


def test_predict_writes_long_steps_without_an_exponent(
    capsys: pytest.CaptureFixture[str], calibrated: str
) -> None:
    asked = ["--workers", "8", "--rows", "hub-bsp", "--model-bytes", "4000000000", "--rate", "1gbit"]
    _, last, shown = told(capsys, "predict", "--calibration", calibrated, *asked)
    assert last["predictions"][0]["step_ms"] > 1e5
    assert "e+05" not in shown


def test_predict_tells_by_which_calibration(capsys: pytest.CaptureFixture[str], calibrated: str) -> None:
    _, last, shown = told(capsys, "predict", "--calibration", calibrated, "--workers", "2")
    assert last["calibration"] == {
        "file": calibrated,
        "bundled": False,
        "date": CONSTANTS.date,
        "cores": 2,
        "machine": {"cores": 2},
    }
    assert f"calibration: {calibrated}, measured {CONSTANTS.date} on" in shown


def test_predict_measures_only_if_it_is_asked_to_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "calibrate", lambda report: CONSTANTS)
    _, last, shown = told(capsys, "predict", "--workers", "2", "--calibrate")
    assert (last["calibration"]["file"], last["calibration"]["bundled"]) == (None, False)
    assert "calibration: measured now on" in shown
    monkeypatch.delattr(calibration, "calibrate")
    _, last, shown = told(capsys, "predict", "--workers", "2")
    assert (last["calibration"]["file"], last["calibration"]["bundled"]) == ("host", True)
    assert "add --calibrate to measure it" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_calibration_answers(capsys: pytest.CaptureFixture[str], name: str) -> None:
    asked = ["--calibration", name, "--workers", "8,64", "--model-bytes", "1000000000", "--batch", "32"]
    code, last, shown = told(capsys, "predict", *asked)
    assert (code, last["calibration"]["bundled"]) == (0, True)
    assert name in shown
    for each in last["predictions"]:
        samples = each["step_ms"] / 1e3 * each["samples_per_second"]
        assert samples == pytest.approx(each["workers"] * 32, rel=0.01)


def test_a_cluster_names_its_sources_and_the_rows_that_it_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["predict", "--calibration", "h100", "--workers", "16", "--model-bytes", "1000000000"]
    _, last, shown = told(capsys, *asked)
    assert last["calibration"]["cluster"] == "h100"
    assert "machine" not in last["calibration"]
    assert "from https://github.com/" in shown
    assert "ring and hub-bsp are not shown" in shown
    _, last, shown = told(capsys, *asked, "--rows", "ring,hub-bsp")
    assert last["crossover"][0]["by_bytes"] is None
    assert "by bytes alone hub-bsp is faster than the ring with no number of servers" in shown
    assert "not shown" not in shown


def test_rows_that_could_be_on_nccl_say_that_they_are_predicted_on_gloo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["predict", "--calibration", "h100", "--workers", "16", "--model-bytes", "1000000000"]
    _, last, shown = told(capsys, *asked, "--rows", "ring,ddp,fsdp2,zero1,mpi,nccl,hub-bsp")
    assert [each["row"] for each in last["predictions"]][:3] == ["ring", "ddp", "fsdp2"]
    named = {word for line in shown.splitlines() for word in line.split()[1:2] if "(Gloo)" in line}
    assert named == {"ring", "ddp", "fsdp2", "zero1"}


def test_the_output_of_nccl_tests_is_a_calibration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "sweep.txt"
    file.write_text(output(1, 8, 100e9) + output(4, 8, 40e9))
    asked = ["--calibration", str(file), "--workers", "8,32", "--model-bytes", str(1 << 28)]
    _, last, shown = told(capsys, "predict", *asked, "--rows", "nccl")
    found = [(each["busbw"], each["by"], each["extrapolated"]) for each in last["predictions"]]
    assert found == [
        (pytest.approx(100, rel=0.01), "sweep", False),
        (pytest.approx(40, rel=0.01), "sweep", False),
    ]
    assert last["crossover"] == []
    assert "busbw GB/s" in shown


def test_one_gpu_exchanges_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--calibration", "h100", "--workers", "1", "--batch", "8"]
    code, last, _ = told(capsys, "predict", *asked)
    assert code == 0
    assert {(each["step_ms"], each["samples_per_second"]) for each in last["predictions"]} == {(0.0, None)}


def test_nodes_of_gpus_can_be_described(capsys: pytest.CaptureFixture[str], calibrated: str) -> None:
    asked = ["--gpus-per-node", "4", "--intra", "800gbit", "--rate", "100gbit", "--workers", "4,16"]
    words = [*asked, "--rows", "nccl,hub-bsp", "--model-bytes", "1000000000"]
    _, last, shown = told(capsys, "predict", "--calibration", calibrated, *words)
    within, _, between, _ = last["predictions"]
    assert within["bound"] == "inside node"
    assert between["bound"] == "link"
    assert within["busbw"] > 4 * between["busbw"]
    assert within["extrapolated"]
    assert "* extrapolated: no sweep has as many nodes and GPUs" in shown


def test_what_is_beyond_the_calibration_is_marked_and_the_host_is_not_called_a_link(
    capsys: pytest.CaptureFixture[str], calibrated: str
) -> None:
    asked = ["--rate", "400gbit", "--workers", "4", "--rows", "ring", "--model-bytes", "100000000"]
    _, last, shown = told(capsys, "predict", "--calibration", calibrated, *asked)
    (found,) = last["predictions"]
    assert (found["bound"], found["extrapolated"]) == ("I/O thread", True)
    assert "* extrapolated: the link is faster than what this calibration reached" in shown
    assert "I/O thread: not the link but the calibrated host" in shown


def test_predict_finds_the_calibration_of_the_folder(
    capsys: pytest.CaptureFixture[str], calibrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(calibrated).parent)
    _, last, _ = told(capsys, "predict", "--workers", "2")
    assert last["calibration"]["file"] == "calibration.json"


def test_predict_tells_samples_a_second_only_of_a_batch(
    capsys: pytest.CaptureFixture[str], calibrated: str
) -> None:
    asked = ["predict", "--calibration", calibrated, "--workers", "2", "--rows", "ring"]
    _, last, shown = told(capsys, *asked)
    assert last["predictions"][0]["samples_per_second"] is None
    assert "samples/s" not in shown
    _, last, shown = told(capsys, *asked, "--batch", "32")
    step = last["predictions"][0]["step_ms"] / 1e3
    assert last["predictions"][0]["samples_per_second"] == pytest.approx(2 * 32 / step)
    assert "samples/s" in shown


def test_what_is_not_said_of_the_link_is_the_calibration_s(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "linked.json"
    replace(CONSTANTS, link=Link(rate=1e9, latency=1e-3)).write(file)

    def step(*words: str) -> float:
        asked = ["--workers", "4", "--rows", "ring", "--model-bytes", "100000000", *words]
        _, last, _ = told(capsys, "predict", "--calibration", str(file), *asked)
        seconds: float = last["predictions"][0]["step_ms"] / 1e3
        return seconds

    assert step("--latency", "3ms") - step() == pytest.approx(8e-3)  # there and back in each of two passes
    assert step("--rate", "1gbit") == pytest.approx(step())


def test_random_delays_are_simulated_with_five_seeds(
    capsys: pytest.CaptureFixture[str], calibrated: str
) -> None:
    slow = ["--straggler", "pareto:50ms", "--straggler-shape", "1.5", "--steps", "20"]
    asked = ["--workers", "4", "--rows", "hub-bsp,hub-asp", *slow]
    _, last, shown = told(capsys, "predict", "--calibration", calibrated, *asked)
    for each in last["predictions"]:
        low, high = each["range_ms"]
        assert low < each["step_ms"] < high
    assert "of the seeds" in shown


def test_predict_reads_a_straggler(capsys: pytest.CaptureFixture[str], calibrated: str) -> None:
    slow = ["--straggler", "constant:50ms", "--straggler-ranks", "0,3"]
    asked = ["--workers", "4", "--rows", "hub-asp", *slow, "--steps", "20"]
    _, last, _ = told(capsys, "predict", "--calibration", calibrated, *asked)
    assert last["predictions"][0]["by"] == "simulation"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--workers", "4,none"), "--workers 4,none: expected comma-separated numbers from 1"),
        (("--workers", "0"), "--workers 0: expected comma-separated numbers from 1"),
        (("--straggler", "sometimes:1"), "--straggler sometimes:1: expected KIND:SECONDS"),
        (("--straggler", "pareto:1:4"), "--straggler pareto:1:4: expected KIND:SECONDS"),
        (("--straggler", "1", "--straggler-ranks", "first"), "--straggler-ranks first: expected comma-sep"),
        (("--straggler-ranks", "1"), "--straggler-ranks 1: the delay is missing; add --straggler"),
        (("--workers", "4", "--straggler", "1", "--straggler-ranks", "4"), "4 workers have ranks 0 to 3"),
        (("--straggler-shape", "2"), "--straggler-shape 2: the delay is missing; add --straggler"),
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
        (("--optimizer", "lion"), "no optimizer 'lion'"),
        (("--calibration", "nowhere.json"), "nowhere.json is not a calibration"),
    ],
)
def test_a_question_that_means_nothing_is_answered_by_what_was_allowed(
    capsys: pytest.CaptureFixture[str], calibrated: str, words: tuple[str, ...], says: str
) -> None:
    code, last, shown = told(capsys, "predict", "--calibration", calibrated, *words)
    assert code == 2
    assert says in last["error"]
    assert says in shown


@pytest.mark.parametrize("name", question.MODELS)
def test_models_are_as_large_as_the_bench_s(name: str) -> None:
    assert question.MODELS[name] == shapes.nbytes(name, 0)


def test_a_shard_for_everybody_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, last, _ = told(capsys, "calibrate", "--serve", "0.0.0.0")
    assert code == 2
    assert "--serve 0.0.0.0 is open to other machines without credentials; add --insecure" in last["error"]


def test_who_serves_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, last, _ = told(capsys, "calibrate", "--serve", "127.0.0.1", "--job", "digits")
    assert code == 2
    assert "--serve measures nothing, so it excludes --job" in last["error"]


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
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    monkeypatch.setattr(calibration, "SMALL_TIMES", 10)
    out = tmp_path / "calibration.json"
    code, last, shown = told(capsys, "calibrate", "--out", str(out), "--turns", "3", "--peer", peer)
    assert (code, last["calibration"]) == (0, str(out))
    constants = read(out)
    assert set(constants.wires) == set(WIRES)
    assert all(wire.alpha > 0 for wire in constants.wires.values())
    assert all(constants.wires[name].beta > 0 and constants.wires[name].cpu > 0 for name in WIRES[1:])
    assert min(constants.copy, constants.serve, *constants.apply.values()) > 0
    assert all(low <= high for low, high in constants.spread.values())
    assert constants.link is not None
    assert constants.machine["cores"] == constants.cores
    assert "zmq.alpha" in shown
