"""`import hubring.horovod.as_horovod`: Horovod's name in a plain Python process, only when asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def python(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)


def test_horovod_is_found_once_it_is_asked_for_and_not_before(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        "import importlib.util, sys\n"
        "import hubring.horovod\n"
        "finders = list(sys.meta_path)\n"
        "before = importlib.util.find_spec('horovod')\n"
        "import hubring.horovod.as_horovod\n"
        "import horovod, horovod.torch as hvd\n"
        "from horovod.torch.mpi_ops import Average\n"
        "print(before, len(sys.meta_path) - len(finders), hvd.allreduce is hubring.horovod.allreduce)\n",
    )
    assert done.stdout == "None 1 True\n", done.stderr


def test_after_horovod_itself_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").touch()
    done = python(tmp_path, "import horovod\nimport hubring.horovod.as_horovod\n")
    assert done.returncode == 1
    assert f"horovod was imported from {tmp_path / 'horovod.py'} before" in done.stderr


@pytest.mark.full
def test_a_plain_script_calls_a_function_on_two_workers(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        "import hubring.horovod.as_horovod\n"
        "import horovod\n"
        "def total():\n"
        "    import torch\n"
        "    import horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    return hvd.rank(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(total, num_proc=2))\n",
    )
    assert done.stdout == "[(0, 2.0), (1, 2.0)]\n", done.stderr
