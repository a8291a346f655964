"""Output of several children on one screen: whole lines, prompts, progress bars, a screen that is gone."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from hubring.ps.process.output import ChildOutput, SharedScreen


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def pipe() -> tuple[IO[bytes], int]:
    source, end = os.pipe()
    return os.fdopen(source, "rb"), end


def carried(
    chunks: Sequence[bytes], copy: Path | None = None, *, keeps_result: bool = False
) -> tuple[bytes, bytes]:
    """What comes out, and what stays."""
    target = io.BytesIO()
    source, end = pipe()
    shown = ChildOutput(source, SharedScreen(target), "[0]:", copy, keeps_result=keeps_result)
    for chunk in chunks:
        os.write(end, chunk)
    os.close(end)
    last = shown.join()
    return target.getvalue(), last


def test_output_is_carried_in_whole_lines_with_marks_and_copied_without(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(b"earlier\n")
    assert carried([b"a\n", b"\n", b"b"], copy) == (b"[0]:a\n[0]:\n[0]:b\n", b"")
    assert copy.read_bytes() == b"earlier\na\n\nb"


def test_a_result_in_the_last_line_stays() -> None:
    assert carried([b"a\n", b"{}\n"], keeps_result=True) == (b"[0]:a\n", b"{}\n")
    assert carried([b"{}\n", b"b\n"], keeps_result=True) == (b"[0]:{}\n[0]:b\n", b"")
    assert carried([b"{}\n"]) == (b"[0]:{}\n", b"")
    assert carried([], keeps_result=True) == (b"", b"")


def test_progress_is_split_at_carriage_returns_however_it_arrives() -> None:
    said = b"\r 10%\r 20%\r\nend\r\n"
    expected = b"[0]: 10%\r[0]: 20%\n[0]:end\n"
    assert carried([said])[0] == expected
    assert carried([bytes([byte]) for byte in said])[0] == expected
    assert carried([b"1\r", b"2\r"])[0] == b"[0]:1\r[0]:2\n"


def on_screen(target: io.BytesIO, *pieces: tuple[str, bytes]) -> bytes:
    screen = SharedScreen(target)
    for owner, piece in pieces:
        screen.write(owner, owner.encode(), piece)
    return target.getvalue()


def test_a_line_ends_the_unfinished_line_of_another_child() -> None:
    pieces = ("a", b"1"), ("b", b"2\n"), ("a", b"\n"), ("a", b"3"), ("b", b"4"), ("a", b"5\n"), ("b", b"\n")
    assert on_screen(io.BytesIO(), *pieces) == b"a1\nb2\na3\nb4\na5\n"


def test_bars_of_two_children_share_a_line() -> None:
    bars = ("a", b"\r1%"), ("b", b"\r1%"), ("a", b"\r2%"), ("b", b"hello\n"), ("a", b"\r3%\n")
    assert on_screen(io.BytesIO(), *bars) == b"a1%\rb1%\ra2%\nbhello\na3%\n"
    erase = b"\r\x1b[K"
    assert on_screen(Terminal(), *bars) == b"a1%" + erase + b"b1%" + erase + b"a2%" + erase + b"bhello\na3%\n"


def test_a_reader_that_is_gone_is_reported_once_and_the_child_is_heard_out() -> None:
    shown, target = os.pipe()
    os.close(shown)
    errors: list[OSError] = []
    source, end = pipe()
    with open(target, "wb") as writer:
        heard = ChildOutput(source, SharedScreen(writer, errors.append))
        for _ in range(4):
            os.write(end, b"x" * 60_000 + b"\n")  # more than a pipe holds
        os.close(end)
        heard.join()
    assert [type(error) for error in errors] == [BrokenPipeError]


def test_a_copy_that_cannot_be_written_is_named() -> None:
    errors: list[OSError] = []
    source, end = pipe()
    heard = ChildOutput(source, SharedScreen(io.BytesIO(), errors.append), copy=Path("/dev/full"))
    os.write(end, b"a\n")
    os.close(end)
    heard.join()
    assert [error.filename for error in errors] == ["/dev/full"]
