"""Fixtures and rules for all tests."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from hubring.ps.observe.logs import OURS
from hubring.workers.launchers.known_launchers import RANK_VARIABLES
from tests.support.processes.process_tree import GRACE, command, descendants, ends_by, take_in_orphans

if TYPE_CHECKING:
    from tests.support.processes.cluster import Cluster
    from tests.support.processes.fork_server import ForkServer

hypothesis.settings.register_profile("hubring", deadline=None)  # a busy machine has no deadline to keep
hypothesis.settings.load_profile("hubring")

# torch gives many of its warnings once in a process, so the order of the tests would decide which one fails.
torch.set_warn_always(True)

SYSTEM_SECONDS = 600.0
"""Timeout of a test of whole programs. The test's own deadlines are shorter, and report more."""

ALONE = ("tests/deploy/", "tests/launchers/")
"""Folders whose tests share a Docker engine or a SLURM cluster, of which a machine can run only one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long tests first: one that starts last would run on when the other test processes have ended. The
    # longest have a timeout of their own.
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("timeout", "slow")])
    for item in items:
        if {"slurm", "yard"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.packages)
        if {"system", "launchers"} & {folder.name for folder in item.path.parents}:
            item.add_marker(pytest.mark.timeout(SYSTEM_SECONDS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In parallel runs, runs the tests of each of these folders in one process, one after another."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next(filter(nodeid.startswith, ALONE), nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def nothing_of_another_test() -> Iterator[None]:
    """Removes a script's rank variables, which other workers would read, and its log's handler."""
    before, ours = set(os.environ), logging.getLogger(OURS)
    yield
    ours.handlers, ours.propagate = [], True
    for name in set(os.environ) - before:
        if name.startswith("HOROVOD_") or name in RANK_VARIABLES.values():
            del os.environ[name]


@pytest.fixture(autouse=True, scope="session")
def orphans_come_to_us() -> None:
    """Makes orphaned processes children of this process, so that tests can find them."""
    take_in_orphans()


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_works() -> None:
    """Programs under test get Ctrl-C also if a shell started pytest in the background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps tokens of killed servers away from later servers on their ports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def fork_server(orphans_come_to_us: None, runtime_directory: None) -> Iterator[ForkServer]:
    """Forks the programs under test; starts with the first test that needs it."""
    # Imported here, since it imports Hubring, which unit tests of a single rule do not need.
    from tests.support.processes.fork_server import ForkServer

    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture
def forked_pythons(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pythons that this process starts are forks too, as those of a `Cluster`."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", fork_server.execute_child())


@pytest.fixture
def cluster(tmp_path: Path, fork_server: ForkServer) -> Iterator[Cluster]:
    """Starts programs, and ends all that the test left running."""
    from tests.support.processes.cluster import Cluster  # imports Hubring too

    with Cluster(tmp_path, fork_server) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """Fails a test that leaves a descendant process running, and ends that process.

    Processes that module or session fixtures started before the test are not checked.
    """
    before = descendants()
    yield
    deadline = time.monotonic() + GRACE
    left = [pid for pid in descendants() - before if not ends_by(pid, deadline)]
    named = [f"{pid} ({command(pid)})" for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"still running {GRACE:g} s after the test: {', '.join(named)}"
