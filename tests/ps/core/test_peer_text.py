"""Text from a peer cannot move a cursor, change a color, hide text or fill a log."""

from __future__ import annotations

import pytest

from hubring.ps.core.bounds import MESSAGE_CHARACTERS, NAME_CHARACTERS, clean, clean_message


@pytest.mark.parametrize("text", ["", "node-3.example", "Trainings-Läufe/größe 7.py", "日本 🙂"])
def test_ordinary_text_is_not_changed(text: str) -> None:
    assert clean(text) == clean_message(text) == text


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\x1b[31mred\x1b[0m", "�red�"),
        ("\x1b]0;title\x07rest", "�rest"),
        ("\x1b]8;;http://x\x1b\\link", "�link"),
        ("\x9b2Jgone", "�gone"),
        ("ends \x1b", "ends �"),
        ("a\rb\x00c\x7f", "a�b�c�"),
        ("file\u202egnp.exe", "file�gnp.exe"),
        ("two\u2028lines", "two�lines"),
        ("half \ud800", "half �"),
    ],
)
def test_control_characters_are_replaced(text: str, cleaned: str) -> None:
    assert clean(text) == clean_message(text) == cleaned


def test_only_a_message_keeps_its_lines() -> None:
    assert clean_message("first\n\tsecond") == "first\n\tsecond"
    assert clean("first\n\tsecond") == "first��second"


def test_long_text_is_cut() -> None:
    assert clean("n" * 10_000_000) == "n" * (NAME_CHARACTERS - 1) + "…"
    assert len(clean_message("line\n" * 10_000_000)) == MESSAGE_CHARACTERS
    assert len(clean("\x1b[31m" * 1_000_000)) <= NAME_CHARACTERS
