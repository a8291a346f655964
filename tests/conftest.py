"""What every test is held to."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes.orphans import take_in_orphans

if TYPE_CHECKING:
    from tests.support.processes.cluster import Cluster
    from tests.support.processes.fork_server import ForkServer

SYSTEM_SECONDS = 600.0
"""For a test of whole programs, so that on a busy machine its own deadlines come first and tell more."""

GRACE = 20.0
"""Seconds in which a process that was told to end may do so; a busy machine takes its time."""

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
    from tests.support.processes.fork_server import (
        ForkServer,  # which imports ours: not for tests of a single rule
    )

    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture
def cluster(tmp_path: Path, fork_server: ForkServer) -> Iterator[Cluster]:
    """Starts our programs, and ends all that the test left."""
    from tests.support.processes.cluster import Cluster  # which looks here for the processes below us

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


def descendants() -> set[int]:
    """Live processes below this one; multiprocessing's own servant, which stays for good, is none of them."""
    found = {*below(os.getpid()), *below(os.getpid())}  # a list that is read as a child ends may lack another
    return {pid for pid in found if "multiprocessing.resource_tracker" not in command(pid)}


def below(pid: int) -> list[int]:
    """Live processes that this one started, and those that they started."""
    found: list[int] = []
    unseen = [pid]
    while unseen:
        started = [child for child in children(unseen.pop()) if parent(child)]
        found += started
        unseen += started
    return found


def children(pid: int) -> list[int]:
    """What each of its threads started, as the kernel lists it: to look at all processes takes too long."""
    return [int(child) for thread in threads(pid) for child in entry(pid, f"task/{thread}/children").split()]


def parent(pid: int) -> int:
    """Its parent's id; 0 for a process that has ended, whether or not somebody waited for it."""
    state, ppid, *_ = (entry(pid, "stat").rpartition(")")[2] or "X 0").split()
    return 0 if state in "ZX" else int(ppid)


def command(pid: int) -> str:
    return entry(pid, "cmdline").replace("\0", " ").strip()


def entry(pid: int, name: str) -> str:
    """What /proc holds of a process; nothing once it has ended, as it may while somebody looks."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def threads(pid: int) -> list[int]:
    """Of a process; none once it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def ends_by(pid: int, deadline: float) -> bool:
    """Waits for the process's end, by its descriptor rather than by looking again and again."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        return bool(ready)
    finally:
        os.close(descriptor)
