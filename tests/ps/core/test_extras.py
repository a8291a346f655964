"""A missing optional package is named, with how to install it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hubring.ps.core.packages import EXTRAS

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("module", EXTRAS)
def test_pyproject_has_the_extra_and_the_extra_installs_the_package(module: str) -> None:
    package, extra = EXTRAS[module]
    assert any(line.startswith(f"{package}>=") for line in PROJECT["optional-dependencies"][extra])
    assert not any(line.startswith(package) for line in PROJECT["dependencies"])
