"""A missing optional package is named, with how to install it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hubring.ps.core import packages
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.packages import EXTRAS, JOBS, missing, require, require_for_job

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)


@pytest.mark.parametrize("module", EXTRAS)
def test_pyproject_has_the_extra_and_the_extra_installs_the_package(module: str) -> None:
    package, extra = EXTRAS[module]
    assert any(line.startswith(f"{package}>=") for line in PROJECT["optional-dependencies"][extra])
    assert not any(line.startswith(package) for line in PROJECT["dependencies"])


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_package_is_named_with_two_commands_that_install_it() -> None:
    with pytest.raises(ConfigError) as raised:
        require("sklearn", "the digits that ship")
    assert str(raised.value) == (
        "the digits that ship: scikit-learn is not installed; install it with: pip install scikit-learn,"
        " or in a clone of Hubring: pip install '.[demo]'"
    )
    assert raised.value.exit_code == 78


def test_an_installed_package_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: object())
    assert missing("ray") == ""
    require("ray", "on_ray.train")
    require_for_job("digits")


@pytest.mark.usefixtures("nothing_installed")
def test_a_job_without_its_package_is_refused_with_a_job_that_needs_none() -> None:
    assert "char-lm" not in JOBS
    with pytest.raises(ConfigError, match=r"job digits: scikit-learn .*; or use --job char-lm, which"):
        require_for_job("digits")
    for harmless in ("char-lm", None):
        require_for_job(harmless)
