"""Kinds of values that settings have: addresses, and the file of `--address-file`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.config import values
from hubring.ps.config.values import address
from hubring.ps.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("127.0.0.1:5555", ("127.0.0.1", 5555)),
        ("hub-0.hub:1", ("hub-0.hub", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_address_is_split(text: str, pair: tuple[str, int]) -> None:
    assert address(text) == pair


@pytest.mark.parametrize(
    "text",
    [
        *("", "hub", "hub:", ":5555", "hub:http", "hub:0", "hub:65536"),
        *("::1:5555", "[::1]", "http://hub:80", "a b:1"),
    ],
)
def test_address_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected HOST:PORT .* as in 127\.0\.0\.1:5555 or \[::1\]:5555"):
        address(text)


def test_the_address_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    """Another user may have made the link in a folder that both can write to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "address").symlink_to(victim)
    values.write_address_file(tmp_path / "address", "127.0.0.1:5555")
    assert victim.read_text() == "precious"
    assert (tmp_path / "address").read_text() == "127.0.0.1:5555\n"
    assert not (tmp_path / "address").is_symlink()


def test_another_user_cannot_take_the_name_of_the_unfinished_file(tmp_path: Path) -> None:
    """In a folder like /tmp, this user could not remove it."""
    (tmp_path / "address.new").mkdir()
    values.write_address_file(tmp_path / "address", "127.0.0.1:5555")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["address", "address.new"]


def test_a_file_that_cannot_be_written_leaves_none_behind(tmp_path: Path) -> None:
    (tmp_path / "address").mkdir()
    with pytest.raises(ConfigError, match="use a path in a writable folder"):
        values.write_address_file(tmp_path / "address", "127.0.0.1:5555")
    assert [path.name for path in tmp_path.iterdir()] == ["address"]
