"""Scripts that replace or close their outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hubring.ps.process.launch import module_command
from tests.workers.scripts import PLAIN, TRAIN, started

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_pythons")]

LOGGER = """
import sys
class Logger:
    def __init__(self, to): self.to = to
    def write(self, text): self.to.write(text)
"""
WARN = "import logging; logging.getLogger('hubring.of.tests').warning('after the script')"
REPLACED = {
    "by a logger": "sys.stdout, sys.stderr = Logger(sys.stdout), Logger(sys.stderr)",
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "none": "sys.stdout = sys.stderr = None",
    "detached": "sys.stdout, sys.stderr = open(sys.stdout.detach().fileno(), 'w', closefd=False), None",
    "in a file": "sys.stdout = sys.stderr = open('log', 'w')",
    "descriptor": "import os; log = open('log', 'w'); os.dup2(log.fileno(), 1); os.dup2(log.fileno(), 2)",
    "input closed": "sys.stdin.close()",
}
OUTPUTS = pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)


@OUTPUTS
@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.full)], ids=["early", "late"])
def test_a_script_that_replaces_its_outputs_still_gives_its_result(
    tmp_path: Path, replace: str, early: bool
) -> None:
    script = tmp_path / "script.py"
    parts = (replace, TRAIN) if early else (TRAIN, replace)
    script.write_text("\n".join([LOGGER, *parts, WARN]))
    ended = started(tmp_path, *module_command("hubring.workers.programs.ps_worker", str(script)))
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (ended.returncode, result["exit_code"], result["steps"]) == (0, 0, 1)
    assert "WARNING: after the script" in ended.stderr


def test_a_script_sets_up_logging_as_in_plain_python(tmp_path: Path) -> None:
    setup = "import logging, sys\nlogging.basicConfig(level='DEBUG', format='%(name)s', stream=sys.stdout)"
    (tmp_path / "script.py").write_text("\n".join([TRAIN, setup, "logging.debug('of the script')", WARN]))
    ended = started(tmp_path, *module_command("hubring.workers.programs.ps_worker", "script.py"))
    assert ended.stdout.splitlines()[:-1] == ["root"]
    assert ended.stderr.count("WARNING: after the script") == 1


@OUTPUTS
def test_a_plain_script_that_finished_ends_as_its_job_does(tmp_path: Path, replace: str) -> None:
    script = tmp_path / "plain.py"
    failing = "def await_end(self): raise JobFailed('a shard is lost')"
    imported = f"from hubring.ps.core.errors import JobFailed\n{LOGGER}"
    plain = PLAIN.replace("def await_end(self): pass", failing).replace(
        "print(reason.name, text, flush=True)", "pass"
    )
    script.write_text(f"{imported}{plain}{replace}")
    ended = started(tmp_path, sys.executable, str(script))
    assert ended.returncode == 69, ended.stderr
    assert "a shard is lost" in ended.stderr
