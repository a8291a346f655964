"""The file of `--address-file`."""

from __future__ import annotations

from pathlib import Path

from hubring.ps.config import address_file


def test_the_address_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    """Another user may have made the link in a folder that both can write to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "address.new").symlink_to(victim)
    address_file.write(tmp_path / "address", "127.0.0.1:5555")
    assert victim.read_text() == "precious"
    assert (tmp_path / "address").read_text() == "127.0.0.1:5555\n"
    assert not (tmp_path / "address").is_symlink()
