"""The last line of a program: JSON for programs, and a short line for a person."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

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


def test_a_summary_counts_the_steps_of_this_run() -> None:
    assert terminal.summary({"steps": 308, "resumed_at": 264, "seconds": 17.6}) == "44 steps in 17.6 s"


def test_an_error_is_not_repeated_on_a_terminal() -> None:
    assert terminal.summary({"steps": 3, "error": "the server is gone", "exit_code": 69}) == ""


def test_every_command_of_a_group_offers_json(capsys: pytest.CaptureFixture[str]) -> None:
    from hubring.workers.compare import cli

    for name in ("run", "report", "list", "predict"):
        with pytest.raises(SystemExit):
            terminal.run(cli.app, "ps-compare", [name, "--help"])
        assert "--json" in capsys.readouterr().out


if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Raw(io.RawIOBase):
    """A file that notes each write, as an unbuffered stdout would make them."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        self.writes.append(bytes(data))
        return len(self.writes[-1])


def test_the_last_line_is_one_write_also_when_unbuffered(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Raw()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))  # type: ignore[type-var]
    terminal.last_line({"rank": 0, "exit_code": 0})
    [written] = raw.writes
    assert written.endswith(b"\n")
    assert json.loads(written) == {"rank": 0, "exit_code": 0}


def test_a_stop_ends_in_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> dict[str, int]:
        raise SystemExit(143)

    assert terminal.conclude("ps-test", stopped) == 143
    assert json.loads(capsys.readouterr().out) == {"error": "stopped by a signal", "exit_code": 143}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "--job",
            "No such option: --job (Possible options: --json); see ps-test --help; that one is the server's",
        ),
        ("--near=x", "valid integer"),
    ],
)
def test_an_option_of_another_program_is_told_where_it_belongs(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def tell(near: int = 0) -> None:
        """Is never called."""

    with pytest.raises(SystemExit, match="2"):
        terminal.run(app, "ps-test", [word], elsewhere="that one is the server's")
    told = capsys.readouterr()
    assert said in told.err
    assert ("the server's" in told.err) is (word == "--job")
    assert json.loads(told.out)["exit_code"] == 2


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_stop_after_the_result_changes_nothing(number: str) -> None:
    late = (
        "import atexit, signal, typer\n"
        "from hubring.ps.config import terminal\n"
        f"atexit.register(signal.raise_signal, signal.{number})\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def tell():\n"
        "    terminal.last_line({'exit_code': 0})\n"
        "terminal.run(app, 'late')\n"
    )
    done = subprocess.run([sys.executable, "-c", late], check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b'{"exit_code": 0}\n', b"")
