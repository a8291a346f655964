"""Every relative link of a page leads somewhere, and its snippets are well-formed."""

from __future__ import annotations

import re
import subprocess
import textwrap
from inspect import ismodule
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from hubring.ps import cli as ps_server
from hubring.workers import collectives, horovod
from hubring.workers.bench import cli as bench
from hubring.workers.compare import cli as ps_compare
from hubring.workers.programs import ps_run, ps_worker
from tests.support.markdown import PAGES, ROOT, Block, anchors, blocks, commands, links

SHELL = ("sh", "bash", "shell")
APPS = {
    "ps-compare": ps_compare.app,
    "ps-run": ps_run.app,
    "ps-server": ps_server.app,
    "ps-worker": ps_worker.app,
    "ps-worker bench": bench.app,
    "ps-worker env": ps_worker.env_app,
}
BLOCKS = [(page, block) for page in PAGES for block in blocks(page)]


def of(*languages: str) -> list[Any]:
    """The blocks in these languages, each under its place in the repository."""
    found = [
        pytest.param(block, id=f"{page.relative_to(ROOT)}:{block.line}")
        for page, block in BLOCKS
        if block.language in languages
    ]
    assert found, languages
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken(page) == []


def broken(page: Path) -> list[str]:
    found = []
    for target in links(page):
        if target.partition(":")[0] in ("http", "https", "mailto"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        inside = file.is_relative_to(ROOT) and file.exists()
        if not inside or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            found.append(target)
    return found


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`-c, d\n\n[1](page.md#a-b-c-d) [2](#a-b-c-d) [3](#e) [4](none.md) `[5](code.md)`\n"
        "<img src='x'><img src=\"none.svg\">\n\n```text\n# f\n[6](none.md)\n```\n[7](#f) [8](../out.md)\n"
    )
    assert broken(page) == ["#e", "none.md", "none.svg", "#f", "../out.md"]


def test_the_site_has_every_page() -> None:
    named = re.findall(r"(?m)^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text())
    assert len(named) == len(set(named))
    shown = {page.relative_to(ROOT).as_posix().removeprefix("deploy/site/") for page in PAGES}
    assert {page for page in shown if not page.startswith("tests/")} == set(named)


def test_the_reference_has_every_module_of_collectives_and_every_name_of_horovod() -> None:
    parts = [
        each.__name__ for each in vars(collectives).values() if ismodule(each) and hasattr(each, "__all__")
    ]
    assert set(parts) <= set((ROOT / "deploy/site/reference/hubring.md").read_text().split())
    listed = re.findall(r"\w+", (ROOT / "deploy/site/reference/horovod.md").read_text())
    names = {
        name for name, value in vars(horovod).items() if not name.startswith("_") and not ismodule(value)
    }
    assert names - set(listed) == {"annotations"}


@pytest.mark.parametrize("block", of("python", "py"))
def test_a_python_snippet_compiles(block: Block) -> None:
    compile(textwrap.dedent(block.code), f"line {block.line}", "exec", dont_inherit=True)


@pytest.mark.parametrize("block", of(*SHELL))
def test_a_shell_snippet_is_well_formed(block: Block) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("block", of("console", *SHELL))
def test_the_programs_know_every_flag_of_a_command(block: Block) -> None:
    for words in commands(block):
        check(words)


def check(words: list[str]) -> None:
    """Parses the command line of our program among these words, if there is one; runs nothing."""
    places = [place for place, word in enumerate(words) if word in APPS]
    if not places:
        return
    name, *arguments = words[places[0] :]
    if arguments and f"{name} {arguments[0]}" in APPS:
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    command: Any = typer.main.get_command(APPS[name])
    while hasattr(command, "commands"):
        assert arguments[0] in command.commands, f"{name} has no command {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        command.make_context(name, arguments)
    except typer.Exit:  # --help
        pass
    except TyperException as error:
        pytest.fail(f"{' '.join(words)}: {error.format_message()}")


@pytest.mark.parametrize(
    "line",
    [
        "srun -n 2 ps-worker --sever x train.py",
        "ps-server begin",
        "ps-compare run --wokers 2",
        "a && ps-run -q",
    ],
)
def test_a_flag_or_command_that_no_program_has_is_found(line: str) -> None:
    *_, words = commands(Block("console", 1, f"$ {line}\n"))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(words)
