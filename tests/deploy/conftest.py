from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy import image
from tests.deploy.engine import Engine
from tests.deploy.fleet import Fleet
from tests.support.needs import do_without


class Yard(NamedTuple):
    """An engine that has the image, and the folder it was built from."""

    engine: Engine
    source: Path


@pytest.fixture(scope="session")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    missing = Engine.missing()
    if missing:
        text = f"no Docker here: {', '.join(missing)} missing; apt-get install docker.io debootstrap"
        do_without(text)
    engine = Engine(tmp_path_factory.mktemp("docker"))
    try:
        engine.start()
        yield Yard(engine, image.build(engine))
    finally:
        engine.stop()
        shutil.rmtree(engine.folder)


@pytest.fixture
def fleet(yard: Yard) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets; `fleet(WORKERS="4")` has that in its environment."""
    made: list[Fleet] = []

    def make(**variables: str) -> Fleet:
        made.append(Fleet(yard.engine, yard.source, f"test{len(made)}", file=None, **variables))
        return made[-1]

    yield make
    for each in made:
        each.down()
