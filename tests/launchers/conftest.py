from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launchers.slurm import Slurm
from tests.support.needs import do_without


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = Slurm.missing()
    if missing:
        do_without(f"no SLURM here: {', '.join(missing)} missing; apt-get install slurm-wlm munge")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
