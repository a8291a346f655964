"""All processes of one row, which wait until it is their turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from workers.bench import member
from workers.compare.process import Processes
from workers.compare.runner import await_address

ROWS = ("gloo+sgd", "hub-shm", "hub-zmq", "hub-grpc")


class Turn(NamedTuple):
    """What one turn gave: the slowest rank's seconds of every step, and the wrong elements of all ranks."""

    seconds: list[float]
    wrong: int


class Team:
    """The ranks of one row, and its server if it has one.

    Args:
        row: One of `ROWS`.
        size: How many ranks.
        shards: Shards of the hub.
        job: What a member is told of the model.
        processes: Where they are started, and who ends them.
        directory: For the files in which they find each other.
        timeout: Seconds that one turn may take.
    """

    def __init__(
        self,
        row: str,
        size: int,
        shards: int,
        job: Sequence[str],
        processes: Processes,
        directory: Path,
        timeout: float,
    ) -> None:
        self.row = row
        self._timeout = timeout
        if row == "gloo+sgd":
            command = partial(_gloo_member, size, directory / "gloo")
        else:
            command = partial(_hub_member, row, size, _serve(row, size, shards, processes, directory))
        self._members = [
            processes.start(f"{row} rank {rank}", [sys.executable, *command(rank), *job], asked=True)
            for rank in range(size)
        ]

    def turn(self, steps: int) -> Turn:
        """Lets all ranks take some steps together.

        Raises:
            ProcessFailed: A rank ended instead; shows the end of its log.
            DeadlineExceeded: A rank took too long.
        """
        for each in self._members:
            each.tell(str(steps))
        replies = [json.loads(each.hear(self._timeout)) for each in self._members]
        seconds = [max(step) for step in zip(*(reply["seconds"] for reply in replies), strict=True)]
        return Turn(seconds, sum(reply["wrong"] for reply in replies))

    def dismiss(self) -> None:
        """Tells the ranks that no order will follow."""
        for each in self._members:
            each.dismiss()


def _serve(row: str, size: int, shards: int, processes: Processes, directory: Path) -> str:
    file = directory / f"{row} address"
    flags = ["--port", "0", "--workers", str(size), "--shards", str(shards), "--address-file", str(file)]
    processes.start(f"{row} server", [sys.executable, "-m", "ps.cli", "start", "--once", *flags])
    return await_address(processes, file)


def _gloo_member(size: int, store: Path, rank: int) -> list[str]:
    place = ["--rank", str(rank), "--size", str(size)]
    return ["-m", member.__name__, "gloo", "--store", str(store), *place]


def _hub_member(row: str, size: int, address: str, rank: int) -> list[str]:
    place = ["--rank", str(rank), "--local-rank", str(rank), "--world-size", str(size)]
    wire = ["--server", address, "--transport", row.removeprefix("hub-")]
    return ["-m", "workers.cli", *wire, *place, member.__file__, "hub"]
