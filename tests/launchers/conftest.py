from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.slurm import Slurm
from tests.system.cluster import Cluster

LIMIT = 600.0
"""Seconds for a test, so that on a busy machine its own deadlines come first and tell more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = Slurm.missing()
    if missing:
        pytest.skip(f"no SLURM here: {', '.join(missing)} missing; apt-get install slurm-wlm munge")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
