"""Comparisons of real trainings: to the end, interrupted, killed, and taken up again."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path

import pytest

from hubring.workers.compare.run.site import why_not
from tests.support.compare.anywhere import PATIENT, reported, results, write_experiment
from tests.support.processes.cluster import PATIENCE, Cluster, measured
from tests.support.processes.process_tree import below, ends_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]

COMPARE = "hubring.workers.compare.cli"
SHORT = ["run", "--rows", "local,hub-bsp", "--seeds", "1", "--epochs", "1", "--target", "0.1"]
LABELS = ["n2 k1 local seed1", "n2 k1 hub-bsp seed1", "n2 k1 hub-bsp seed1 turn1"]


def finished(folder: Path) -> dict[str, int]:
    """When each finished run wrote its outcome."""
    return {file.parent.name: file.stat().st_mtime_ns for file in folder.glob("runs/*/outcome.json")}


@pytest.mark.full
def test_a_row_on_the_hub_and_one_alone_end_in_the_same_parameters(cluster: Cluster, tmp_path: Path) -> None:
    compare = cluster.run("compare", COMPARE, *SHORT, "--out", str(tmp_path / "out"))
    last = compare.done()
    found = results(tmp_path / "out")
    assert last["gate"] == {"passed": True, "pairs": 2}
    assert [pair["second"] for pair in found["gate"]["pairs"]] == ["hub-bsp", "hub-bsp again"]
    assert [pair["steps"] for pair in found["gate"]["pairs"]] == [20, None]
    assert found["gate"]["pairs"][0]["final"] != found["gate"]["pairs"][0]["difference"]
    assert [(each["judged"], each["fault"]) for each in found["gate"]["steps"]] == [(22, "")] * 3
    assert "66 of 66 updates were repeated in one process, and none was wrong." in compare.said()
    assert {row["row"]: len(row["seeds"]) for row in found["rows"]} == {"local": 1, "hub-bsp": 1}
    assert "--mode bsp" in found["commands"][LABELS[1]][0]
    [line] = found["bandwidth"]
    assert (line["row"], line["type"], line["redop"], line["wrong"]) == ("hub-bsp", "float", "avg", 0)
    assert line["size"] == 4 * line["count"] > 0
    [host] = json.loads((tmp_path / "out/runs" / LABELS[1] / "trace.json").read_text())["otherData"].values()
    assert (host["moved_us"], host["error_us"]) == (0, 0)
    again = cluster.run("report", COMPARE, "report", str(tmp_path / "out"))
    assert again.done()["verdict"] == last["verdict"]


@pytest.mark.full
def test_a_rate_at_which_a_row_diverges_is_a_result(cluster: Cluster, tmp_path: Path) -> None:
    words = [*SHORT, "--rows", "hub-asp,ring", "--learning-rate", "1e30", "--out", str(tmp_path / "out")]
    compare = cluster.run("compare", COMPARE, *words)
    said = [row["failed"] for row in results(tmp_path / "out")["rows"]] if compare.done(1) else []
    assert len(said) == 2
    assert all("1 of 1 runs: diverged after" in failed for failed in said)


@pytest.mark.full
def test_rows_that_lose_their_coordinator_fail_and_one_with_a_standby_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = [*SHORT, "--epochs", "20", "--rows", "ring,hub-bsp,hub-standby", "--kill", "coordinator@40"]
    compare = cluster.run("compare", COMPARE, *words, "--out", str(tmp_path / "out"))
    compare.done()
    failed = {row["row"]: row["failed"] for row in results(tmp_path / "out")["rows"]}
    assert failed == {
        "ring": "1 of 1 runs: the ring broke",
        "hub-bsp": "1 of 1 runs: also failed: worker 0, worker 1",
        "hub-standby": None,
    }


@pytest.mark.full
def test_a_killed_comparison_resumes_without_repeating_runs(cluster: Cluster, tmp_path: Path) -> None:
    out, go = tmp_path / "out", tmp_path / "go"
    words = measured(60, "--rows", "local,hub-bsp", "--seeds", "1", "--out", str(out), go=go)
    killed = cluster.run("killed", COMPARE, *words)
    record = out / "runs" / LABELS[1] / "record 0.jsonl"
    killed.until(lambda: record.exists() and record.stat().st_size > 0, "its second run")
    children = below(killed.process.pid)
    killed.process.send_signal(signal.SIGKILL)
    killed.wait()
    assert all(ends_by(pid, time.monotonic() + PATIENCE) for pid in children)
    before = finished(out)
    assert list(before) == LABELS[:1]
    go.touch()
    again = cluster.run("again", COMPARE, *words)
    again.done()
    after = finished(out)
    assert set(after) == set(LABELS)
    assert after[LABELS[0]] == before[LABELS[0]]
    assert f"{LABELS[0]}: already finished" in again.said()
    assert results(out)["gate"]["passed"]


@pytest.mark.full
@pytest.mark.parametrize("where", [(), ("--rate", "1gbit")], ids=["one machine", "namespaces"])
def test_one_experiment_file_runs_with_and_without_links(
    cluster: Cluster, tmp_path: Path, where: tuple[str, ...]
) -> None:
    if where and (reason := why_not()):
        pytest.skip(reason)
    words = ["run", str(write_experiment(tmp_path)), *where, "--out", str(tmp_path / "out")]
    cluster.run("compare", COMPARE, *words).done(0, PATIENT)
    assert reported(tmp_path / "out")["clocks"] == []


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_comparison_that_is_stopped_ends_its_children_and_says_how_to_go_on(
    cluster: Cluster, tmp_path: Path, number: int, code: int
) -> None:
    words = measured(1_000_000, "--rows", "hub-bsp", "--seeds", "0", "--out", str(tmp_path / "out"))
    program = cluster.run("compare", COMPARE, *words)
    record = tmp_path / "out" / "runs" / "n2 k1 hub-bsp seed0" / "record 0.jsonl"
    program.until(lambda: record.exists() and record.stat().st_size > 0, "its first run")
    program.process.send_signal(number)
    assert program.done(code)["exit_code"] == code
    assert f"to resume, run: ps-compare {shlex.join(words)}" in program.said()
    assert finished(tmp_path / "out") == {}
    # that no child is left is seen to by the fixture no_process_outlives_its_test
