"""A missing optional package is named with how to install it, and a file that hides a package is named."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from hubring.ps.core import packages

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("module", packages.EXTRAS)
def test_pyproject_has_the_extra_and_the_extra_installs_the_package(module: str) -> None:
    package, extra = packages.EXTRAS[module]
    assert any(line.startswith(f"{package}>=") for line in PROJECT["optional-dependencies"][extra])
    assert not any(line.startswith(package) for line in PROJECT["dependencies"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script's folder, first on the search path; safetensors is not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "safetensors", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["safetensors.py", "safetensors/__init__.py"])
def test_a_file_that_hides_a_package_is_named(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    assert packages.hidden_by(folder).startswith(f"{folder / name} hides the package safetensors")


def test_an_imported_package_cannot_be_shadowed(folder: Path) -> None:
    importlib.import_module("torch")
    (folder / "torch.py").touch()
    assert packages.hidden_by(folder) == ""


def test_a_package_that_is_installed_nowhere_else_hides_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "safetensors.py").touch()
    monkeypatch.setattr(sys, "path", [str(folder)])
    assert packages.hidden_by(folder) == ""


def test_a_folder_of_that_name_is_no_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "wandb").mkdir()  # W&B itself writes there
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert packages.missing("wandb").startswith("wandb is not installed")


def test_packages_are_among_what_is_installed() -> None:
    installed = {name.partition(">")[0] for name in PROJECT["dependencies"]}
    named = {"google": "protobuf", "grpc": "grpcio", "zmq": "pyzmq"}
    assert {named.get(name, name) for name in packages.PACKAGES} <= installed


@pytest.mark.parametrize(
    ("version", "warned"),
    [("2.13.0+cpu", False), ("2.14.9", False), ("2.15.0a0+git1", True), ("2.15.0", True), ("3.0.0", True)],
)
def test_a_release_of_torch_above_the_newest_tested_one_is_named(version: str, warned: bool) -> None:
    text = packages.untested_torch(version)
    assert text.startswith(f"torch {version} is newer than torch {packages.NEWEST_TORCH}") == warned
    assert bool(text) == warned


def test_the_newest_tested_release_is_the_one_that_ci_runs() -> None:
    newest = max(re.findall(r"TORCH=(\d+\.\d+)", (ROOT / ".ci/run").read_text()))
    assert newest == packages.NEWEST_TORCH
