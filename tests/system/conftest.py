from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()
