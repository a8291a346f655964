"""A repository may have folders and files that are named like ours: nothing of theirs is taken for ours.

Real programs, not forks: what they find depends on how Python starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAMS = Path(sys.executable).parent
SCRIPT = """\
import ps, protos
import torch
from workers import model as theirs
import hubring

assert {ps.WHOSE, theirs.WHOSE, protos.WHOSE} == {"the script's"}
hubring.init()
model = torch.nn.Linear(2, 1)
optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
print("trained by", hubring.topology(), hubring.size())
"""
TRAP = "raise SystemExit('this file is the script\\'s, and was imported for ours')\n"
NAMES = ["hubring.py", "torch.py", "grpc.py", "msgspec.py"]
NAMES += ["ps/core.py", "workers/api.py", "protos/control_pb2.py"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with folders of our names, one without `__init__.py`, and a script that imports both."""
    for file in ("ps/__init__.py", "workers/model.py", "protos/__init__.py"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text('WHOSE = "the script\'s"\n')
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def trapped(folder: Path) -> Path:
    """The same with files that end a program which takes them for ours."""
    for name in NAMES:
        (folder / name).write_text(TRAP)
    return folder


def outside() -> dict[str, str]:
    """The environment of somebody who knows nothing of this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(folder: Path, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=outside(), capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.parametrize("topology", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_ps_run_trains_a_script_beside_files_of_our_names(trapped: Path, topology: str) -> None:
    ended = run(trapped, [PROGRAMS / "ps-run", "-np", "1", "--topology", topology, "train.py"])
    assert (ended.returncode, ended.stdout.count(f"trained by {topology} 1")) == (0, 1), ended.stderr


@pytest.mark.full
def test_ps_server_and_ps_worker_train_it_too(trapped: Path) -> None:
    started: list[str | Path] = [PROGRAMS / "ps-server", "start", "--port", "0", "--once", "--workers", "1"]
    with subprocess.Popen(started, cwd=trapped, env=outside(), stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        _, _, address, *_ = server.stderr.readline().split()  # ps-server on HOST:PORT
        worker = run(trapped, [PROGRAMS / "ps-worker", "--server", address, "train.py"])
        if worker.returncode:
            server.kill()
        assert (worker.returncode, server.wait(60)) == (0, 0), worker.stderr
    assert "trained by hub 1" in worker.stdout


@pytest.mark.full
def test_several_workers_of_one_ps_worker_train_it_too(trapped: Path) -> None:
    ended = run(trapped, [PROGRAMS / "ps-worker", "--gpus", "1", "--accelerator", "cpu", "train.py"])
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["exit_code"] == 0


@pytest.mark.full
def test_plain_python_trains_a_script_beside_folders_of_our_names(folder: Path) -> None:
    ended = run(folder, [sys.executable, "train.py"])
    assert (ended.returncode, ended.stdout) == (0, "trained by local 1\n"), ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("command", [[sys.executable], [PROGRAMS / "ps-worker"]])
def test_a_file_that_hides_a_package_from_us_gets_one_clear_error(folder: Path, command: list[str]) -> None:
    (folder / "safetensors.py").write_text(TRAP)
    ended = run(folder, [*command, "train.py"])
    said = f"{folder / 'safetensors.py'} hides the package safetensors, which Hubring needs; rename the file"
    assert ended.returncode != 0
    assert ended.stderr.count(said) == 1, ended.stderr
