"""The shell blocks of the README and of the tutorial run as they are, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.markdown import ROOT, Block, blocks
from tests.support.processes.ports import free_port

PAGES = [ROOT / "README.md", ROOT / "workers/examples/README.md"]
SKIPPED = ("make ", "docker ", ". ", "pip ")
"""What begins a line that installs something, or needs a Docker engine."""
LEFT_OUT = ("[.]*", "build", "dist", "results", "wheels", "__pycache__")
SECONDS = 800.0


def runnable(block: Block) -> str:
    """The lines of a block that are not skipped; empty if none has a command."""
    lines = [line for line in block.code.splitlines() if not line.startswith(SKIPPED)]
    return "\n".join(lines) if any(line and not line.startswith("#") for line in lines) else ""


RUNNABLE = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if block.language == "sh" and (code := runnable(block))
]


def test_each_page_has_a_block_that_runs() -> None:
    for page in PAGES:
        assert any(runnable(block) for block in blocks(page) if block.language == "sh"), page


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "clone"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("code", RUNNABLE)
def test_a_shell_block_runs_without_an_error(code: str, clone: Path) -> None:
    port = str(free_port())
    code = code.replace("--rows ring", "--seeds 0 --rows ring")  # a third of the time
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code.replace(":5555", f":{port}")],
        cwd=clone,
        env={**os.environ, "PATH": programs, "PS_PORT": port, "PS_PAGE_PORT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    codes = re.findall(r'"exit_code": (\d+)', ended.stdout)  # of programs in the background too
    assert set(codes) <= {"0"}, ended.stdout + ended.stderr
