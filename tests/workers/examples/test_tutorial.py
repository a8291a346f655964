"""The tutorial shows the script that it links to."""

from __future__ import annotations

import re
from pathlib import Path

from hubring.workers import examples

FOLDER = Path(examples.__file__).parent


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_code_in_the_tutorial_is_in_its_script() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    shown = [line.strip() for block in blocks for line in block.splitlines() if line.strip(" .")]
    script = [line.strip() for line in lines(FOLDER / "tutorial_after.py")]
    assert shown
    assert [line for line in shown if line not in script] == []


def test_each_numbered_change_is_shown_and_all_else_was_there_before() -> None:
    tutorial = (FOLDER / "README.md").read_text()
    before = {line.strip() for line in lines(FOLDER / "tutorial_before.py")}
    new = [line.strip() for line in lines(FOLDER / "tutorial_after.py")[1:] if line.strip() not in before]
    unmarked = [line for line in new if not re.search(r"# \d$", line)]
    assert unmarked == ["import hubring", "hubring.barrier()"]
    assert all(line in tutorial for line in new)
