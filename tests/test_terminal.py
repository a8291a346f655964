"""The last line of a program."""

from __future__ import annotations

import io
import json
import sys

import pytest

from ps import terminal


class Raw(io.RawIOBase):
    """A file that notes each write, as an unbuffered stdout would make them."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.writes.append(bytes(data))
        return len(data)


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
    assert json.loads(capsys.readouterr().out) == {"error": "told to stop", "exit_code": 143}
