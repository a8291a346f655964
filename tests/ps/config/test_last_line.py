"""A result is JSON for programs, and a short line for a person."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import typer

from hubring.ps.config import terminal

RESULT = {
    "steps": 22,
    "seconds": 1.94,
    "metrics": {"test_loss": 2.03602, "phase": "end", "test_accuracy": 0.638889},
    "checkpoint": "saved/step-22",
    "exit_code": 0,
}


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_json", False)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app = typer.Typer()

    @app.command()
    def train() -> None:
        terminal.last_line(RESULT)

    with pytest.raises(SystemExit) as ended:
        terminal.run(app, "train", list(words))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_without_a_terminal_it_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys)) == RESULT


def test_on_a_terminal_it_is_a_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert json.loads(printed(capsys)) == RESULT, "the input is no terminal, as below mpirun"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    summary = "22 steps in 1.9 s, test_loss 2.03602, test_accuracy 0.638889, checkpoint: saved/step-22\n"
    assert printed(capsys) == summary
    assert json.loads(printed(capsys, "--json")) == RESULT


def test_an_error_is_not_repeated_on_a_terminal() -> None:
    assert terminal.summary({"steps": 3, "error": "the server is gone", "exit_code": 69}) == ""


def test_every_command_of_a_group_offers_json(capsys: pytest.CaptureFixture[str]) -> None:
    from hubring.workers.compare import cli

    for name in ("run", "report", "list", "predict"):
        with pytest.raises(SystemExit):
            terminal.run(cli.app, "ps-compare", [name, "--help"])
        assert "--json" in capsys.readouterr().out
