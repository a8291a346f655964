"""Mistakes are answered within 15 seconds, by a sentence that names the cause and the mend."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.system.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow

SOON = 15.0
"""Seconds by a stopwatch: what a busy machine takes to start a program is not the program's."""


def test_a_server_that_is_not_there_is_told_within_15_seconds(cluster: Cluster) -> None:
    with socket.socket() as free, socket.socket() as mute:
        for each in (free, mute):
            each.bind(("127.0.0.1", 0))
        mute.listen()
        wrong = [f"127.0.0.1:{each.getsockname()[1]}" for each in (free, mute)]
        wrong.append("no-such-host.invalid:5555")
        workers = [cluster.worker(address, SMALL, "5") for address in wrong]  # each looks for 10 s
        errors = [worker.done(69, timeout=SOON)["error"] for worker in workers]
    assert all(address in error for address, error in zip(wrong, errors, strict=True))
    assert "ps-server start" in errors[0]


def test_an_address_without_a_port_is_a_bad_setting(cluster: Cluster) -> None:
    assert "HOST:PORT" in cluster.worker("localhost", SMALL, "5").done(78)["error"]


def test_a_second_job_is_refused_while_the_first_runs(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "1", "--once")
    go = tmp_path / "go"
    first = cluster.worker(address, SMALL, "40", "16", "hold", str(go), "20")
    first.until_said("holding")
    second = cluster.worker(address, "--job", "char-lm").done(78, timeout=SOON)
    assert "small.py" in second["error"]
    assert "char-lm" in second["error"]
    go.touch()
    assert first.done()["steps"] == 40
    server.done()


@pytest.mark.parametrize("widths", [("16", "24"), ("16", "90000"), ("70000", "90000")])
def test_workers_whose_models_differ_are_told_the_first_difference(
    cluster: Cluster, widths: tuple[str, str]
) -> None:
    """Wide ones are large enough that workers try sizes of slices before they begin."""
    server, address = cluster.server("--workers", "2", "--once")
    pair = [cluster.worker(address, "--transport", "zmq", SMALL, "40", width) for width in widths]
    for worker in pair:
        worker.until_said("hub in mode")  # the seconds count from here, however long torch took to start
    codes = [worker.wait(SOON) for worker in pair]
    assert sorted(codes) in ([69, 78], [78, 78]), [worker.said() for worker in pair]
    for worker in pair:
        assert any(f"0.weight [8, {width}]" in worker.result()["error"] for width in widths)
    server.done(1)


def test_a_checkpoint_of_another_model_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--once", "--checkpoint-dir", str(tmp_path / "saved"))
    cluster.worker(address, SMALL, "10", "16").done()
    server.done()
    server, address = cluster.server("--once", "--checkpoint-dir", str(tmp_path / "saved"), name="second")
    result = cluster.worker(address, SMALL, "10", "24").done(78, timeout=SOON)
    assert "checkpoint" in result["error"]
    assert "0.weight [8, 24]" in result["error"]


def test_a_failing_script_prints_its_traceback_last_and_once(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import workers\nworkers.init()\nraise ValueError('seven is not a colour')\n")
    server, address = cluster.server("--once")
    worker = cluster.worker(address, str(script))
    assert "seven is not a colour" in worker.done(1)["error"]
    assert worker.said().rstrip().endswith("ValueError: seven is not a colour")
    assert worker.said().count("Traceback") == 1
    assert "seven is not a colour" in server.done(1)["failed"]["0"]


def test_a_taken_port_is_a_bad_setting(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        second = cluster.run("second", "ps.cli", "start", "--port", str(port))
        assert str(port) in second.done(78, timeout=SOON)["error"]


def test_a_misused_optimizer_names_the_line_of_the_script(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(
        "import torch, workers\nworkers.init()\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = workers.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "for _ in range(2):\n    model(torch.ones(2)).sum().backward()\n"
    )
    error = cluster.run("alone", "workers.cli", str(script)).done(78)["error"]
    assert "backward_passes_per_step" in error
    assert "twice.py line 6" in error


def test_a_call_that_means_nothing_ends_in_a_result_too(cluster: Cluster) -> None:
    assert "--server" in cluster.run("typo", "workers.cli", "--sever", "x").done(2)["error"]
