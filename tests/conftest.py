"""What every test is held to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes.orphans import take_in_orphans
from tests.support.processes.process_tree import GRACE, command, descendants, ends_by

if TYPE_CHECKING:
    from tests.support.processes.cluster import Cluster
    from tests.support.processes.fork_server import ForkServer

SYSTEM_SECONDS = 600.0
"""For a test of whole programs, so that on a busy machine its own deadlines come first and tell more."""

ALONE = ("tests/deploy/", "tests/launchers/")
"""Folders whose tests share what a machine has room for once, a Docker engine or a SLURM."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"slurm", "yard"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.packages)
        if {"system", "launchers"} & {folder.name for folder in item.path.parents}:
            item.add_marker(pytest.mark.timeout(SYSTEM_SECONDS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run side by side, those of one of these folders run in one process, one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next(filter(nodeid.startswith, ALONE), nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def orphans_come_to_us() -> None:
    """Makes a process whose parent ended a child of this one, so that it is not lost from sight."""
    take_in_orphans()


@pytest.fixture(scope="session")
def fork_server(orphans_come_to_us: None) -> Iterator[ForkServer]:
    """Forks the programs under test, from the first test on that starts one."""
    # It imports ours: that is not for tests of a single rule.
    from tests.support.processes.fork_server import ForkServer

    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture
def cluster(tmp_path: Path, fork_server: ForkServer) -> Iterator[Cluster]:
    """Starts our programs, and ends all that the test left."""
    from tests.support.processes.cluster import Cluster  # imports ours too

    cluster = Cluster(tmp_path, fork_server)
    yield cluster
    cluster.end()


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """Fails a test that leaves a child process running, or a child of one, and ends that process.

    What a module's or session's fixtures started before the test is theirs to end.
    """
    before = descendants()
    yield
    deadline = time.monotonic() + GRACE
    left = [pid for pid in descendants() - before if not ends_by(pid, deadline)]
    told = [f"{pid} ({command(pid)})" for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"still running {GRACE:g} s after the test: {', '.join(told)}"
