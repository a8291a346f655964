"""Where copies of what workers say go."""

from __future__ import annotations

from pathlib import Path

OUTPUTS = ("stdout", "stderr")


def folder_of(outputs: Path | str | None, rank: int, size: int) -> Path | None:
    """Where one of `size` workers has copies of its outputs, made if need be; None: nowhere."""
    if outputs is None:
        return None
    folder = Path(outputs) / f"rank.{rank:0{len(str(size - 1))}}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
