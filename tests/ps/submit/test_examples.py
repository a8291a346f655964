"""The examples that ship are what `ps-server submit` prints today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.submissions import program

DEPLOY = Path(__file__).parents[3] / "deploy"
COMMANDS = {
    found[2]: shlex.split(found[1])
    for found in re.finditer(r"(?m)^ps-server submit (.+) > (\S+)$", (DEPLOY / "SUBMIT.md").read_text())
}


@pytest.mark.parametrize("path", COMMANDS)
def test_the_example_is_what_its_command_prints(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program(*COMMANDS[path]) == 0
    assert (DEPLOY / "examples" / path).read_text() == capsys.readouterr().out


def test_every_example_has_its_command() -> None:
    assert {path.name for path in (DEPLOY / "examples").iterdir()} == COMMANDS.keys()
