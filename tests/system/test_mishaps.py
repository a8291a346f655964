"""Mistakes are answered within 15 seconds, by a message that names the cause and the fix."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.processes.cluster import SMALL, Cluster, await_all
from tests.system.mishaps.mishap import SOON, Mishap
from tests.system.mishaps.table import MISHAPS, PAGE, SECTIONS, page, play, rows_of

FIRST = {
    "`ps-server status` without a server",
    "the server runs another job",
    "a misspelt flag",
    "a stopped worker continues (SIGCONT)",
    "a checkpoint folder that another server uses",
    "a gradient is NaN",
    "a small /dev/shm, for a DataLoader with workers",
}
"""What `make test` plays, one of each section that is quick; `make test-full` plays the others."""


def case(mishap: Mishap) -> ParameterSet:
    marks = () if mishap.name in FIRST else pytest.mark.full
    return pytest.param(mishap, id=f"{mishap.name}, printed by {mishap.program}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("mishap", [case(mishap) for mishap in MISHAPS])
def test_the_message_names_who_since_when_why_and_the_fix(cluster: Cluster, mishap: Mishap) -> None:
    assert play(mishap, cluster) == rows_of(PAGE.read_text()).get((mishap.name, mishap.program)), (
        f"{PAGE} says something else: python -m tests.system.mishaps.table makes it anew"
    )


def test_one_mishap_of_each_section_is_among_the_first() -> None:
    for section in SECTIONS.values():
        assert FIRST & {mishap.name for mishap in section}
    assert {mishap.name for mishap in MISHAPS} >= FIRST


def test_the_page_lists_these_mishaps_and_no_others() -> None:
    text = PAGE.read_text()
    assert len(MISHAPS) >= 25
    assert text == page(rows_of(text))


def test_a_message_without_the_fix_does_not_count() -> None:
    said = "no server answers at 127.0.0.1:1 after 10 s: no process listens on that port"
    fix = ". Check the address, or start a server there: ps-server start --port 1"
    assert [MISHAPS[0].message(line) for line in (said, said + fix)] == ["", said + fix]


@pytest.mark.slow
@pytest.mark.parametrize(
    "widths", [("16", "90000"), pytest.param(("70000", "90000"), marks=pytest.mark.full)]
)
def test_workers_whose_models_differ_are_told_the_first_difference(
    cluster: Cluster, widths: tuple[str, str]
) -> None:
    """Wide ones are large enough that workers try sizes of slices before they begin."""
    server, address = cluster.server("--workers", "2", "--once")
    pair = [cluster.worker(address, "--transport", "zmq", SMALL, "40", width) for width in widths]
    await_all(pair, "hub in mode")  # the seconds count from here, however long torch took to start
    assert [worker.wait(SOON) for worker in pair] == [78, 78], [worker.said() for worker in pair]
    for worker in pair:
        assert any(f"0.weight [8, {width}]" in worker.result()["error"] for width in widths)
    server.done(78)  # to start it again would not help


@pytest.mark.slow
def test_grpc_prints_nothing_of_its_own_about_a_taken_port(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = cluster.run("taken", "hubring.ps.cli", "start", "--port", str(taken.getsockname()[1]))
        server.done(78)
    assert len(server.said().splitlines()) == 1, server.said()


@pytest.mark.slow
def test_a_failing_script_prints_its_traceback_last_and_once(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import hubring\nhubring.init()\nraise ValueError('seven is not a colour')\n")
    server, address = cluster.server("--once")
    worker = cluster.worker(address, str(script))
    assert "seven is not a colour" in worker.done(1)["error"]
    assert worker.said().rstrip().endswith("ValueError: seven is not a colour")
    assert worker.said().count("Traceback") == 1
    assert "seven is not a colour" in server.done(1)["failed"]["0"]
