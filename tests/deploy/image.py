"""The image, built without a registry: on a Debian that debootstrap makes, from wheels that pip brought."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.deploy.engine import CALL_SECONDS, Engine
from tests.deploy.recipe import ROOT

SUITE = "bookworm"
"""The Debian whose Python is 3.11, as is the one that the wheels are for."""
BASE = "hubring-base:test"
IMAGE = "hubring:test"


def build(engine: Engine) -> Path:
    """Builds the image as a user would, by Compose; returns the folder that is like a clone."""
    source = engine.folder / "source"
    _import_base(engine)
    _copy(source)
    _download(source / "wheels")
    compose = ["compose", "--file", str(source / "deploy" / "compose.yaml")]
    engine.run(*compose, "build", "--build-arg", "PIP_NO_INDEX=1", "server", BASE_IMAGE=BASE, IMAGE=IMAGE)
    return source


def _import_base(engine: Engine) -> None:
    folder = engine.folder / "base"
    # In a mount namespace of its own, which leaves no mount behind, however it ends.
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", "--include=python3,python3-venv"]
    _succeed([*command, SUITE, str(folder)])
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
        imported = subprocess.run(
            ["docker", "import", "-", BASE], env=engine.environment, stdin=tar.stdout, timeout=CALL_SECONDS
        )
    assert (tar.returncode, imported.returncode) == (0, 0)
    shutil.rmtree(folder)


def _copy(source: Path) -> None:
    source.mkdir()
    for name in (".dockerignore", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("protos", "ps", "workers", "deploy"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "hubring", source / "hubring", symlinks=True)


def _download(wheels: Path) -> None:
    constraints = ROOT / "constraints.txt"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    dependencies = [*project["project"]["dependencies"], *extras["demo"], *extras["fast"]]
    packages = [*dependencies, *project["build-system"]["requires"]]
    # Asked for by its very version, torch comes as the CPU's build where a machine has that.
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(wheels)]
    _succeed([*pip, "-c", str(constraints), torch, *packages])


def _succeed(command: list[str]) -> None:
    ran = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=CALL_SECONDS
    )
    assert ran.returncode == 0, f"{' '.join(command)}:\n{ran.stdout[-4000:]}{ran.stderr[-4000:]}"
