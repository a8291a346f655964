"""What a worker says, line by line: marked with its rank, or into a file of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import IO, BinaryIO

OUTPUTS = ("stdout", "stderr")


def folder_of(outputs: Path | str | None, rank: int, size: int) -> Path | None:
    """Where one of `size` workers has copies of its outputs, made if need be; None: nowhere."""
    if outputs is None:
        return None
    folder = Path(outputs) / f"rank.{rank:0{len(str(size - 1))}}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Stream:
    """Carries one output of one worker until that ends it.

    Args:
        source: What the worker writes into.
        target: Where whole lines go, one write each.
        mark: What stands before each line.
        copy: A file that gets the same without marks; None: none.
    """

    def __init__(self, source: IO[bytes], target: BinaryIO, mark: str, copy: Path | None) -> None:
        self._source = source
        self._target = target
        self._mark = mark.encode()
        self._copy = copy.open("ab") if copy is not None else None
        self._thread = threading.Thread(target=self._carry, name=f"stream {mark}")
        self._thread.start()

    def join(self) -> None:
        """Returns once everything has been carried."""
        self._thread.join()

    def _carry(self) -> None:
        for line in self._source:
            whole = line if line.endswith(b"\n") else line + b"\n"
            self._target.write(self._mark + whole)
            self._target.flush()
            if self._copy is not None:
                self._copy.write(line)
                self._copy.flush()
        self._source.close()
        if self._copy is not None:
            self._copy.close()
