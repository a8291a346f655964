"""Runs one row: a server where it needs one, its workers, and what they left."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ps.config import environment
from workers.compare.outcome import Line, Outcome, latest, read_record
from workers.compare.process import Processes
from workers.compare.row import Row

_OF_LAUNCHERS = ("PS_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
_OF_TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS"}


@dataclass(frozen=True, slots=True)
class Runner:
    """Starts every row in the same way.

    Attributes:
        job: Name of the job that ships.
        job_arguments: Its own options, the same for all rows.
        workers: Processes that share the batch; the local row has one.
        shards: Shard processes of the hub.
        transport: Wire to the hub.
        threads: PyTorch's threads in every process of every row.
        timeout: Seconds that one run may take.
        directory: Where each run gets a directory of its own.
    """

    job: str
    job_arguments: tuple[str, ...]
    workers: int
    shards: int
    transport: str
    threads: int
    timeout: float
    directory: Path

    def run(self, row: Row, label: str, progress: Callable[[Line], None]) -> Outcome:
        """Trains once.

        Args:
            row: Which way.
            label: Name of this run, and of its directory.
            progress: Called with rank 0's latest report, a few times a second.

        Raises:
            ProcessFailed: A process failed; shows the end of its log.
            DeadlineExceeded: The run took longer than the timeout.
        """
        place = self.directory / label
        place.mkdir(parents=True, exist_ok=True)
        size = row.workers(self.workers)
        records = [place / f"record {rank}.jsonl" for rank in range(size)]
        with Processes(place, clean_environment(self.threads), self.timeout) as processes:
            address = None
            if row.server is not None:
                processes.start("server", self._server_command(row, place))
                address = await_address(processes, place / "address")
            team = [
                processes.start(f"worker {rank}", self._worker_command(row, place, rank, address))
                for rank in range(size)
            ]
            while running := processes.running():
                processes.pause(f"the end of {', '.join(process.name for process in running)}")
                if (line := latest(records[0])) is not None:
                    progress(line)
        return Outcome(
            records=[read_record(record) for record in records],
            results=[worker.result() for worker in team],
            parameters=place / "parameters.safetensors",
            commands=[shlex.join(process.command) for process in processes.started],
        )

    def _server_command(self, row: Row, place: Path) -> list[str]:
        assert row.server is not None
        (place / "address").unlink(missing_ok=True)
        flags = {"port": 0, "workers": self.workers, "shards": self.shards, "address-file": place / "address"}
        return [sys.executable, "-m", "ps.cli", "start", "--once", *_spell(flags), *row.server]

    def _worker_command(self, row: Row, place: Path, rank: int, address: str | None) -> list[str]:
        flags: dict[str, object] = {"job": self.job, "record": place / f"record {rank}.jsonl"}
        if address is not None:
            flags |= {"server": address, "rank": rank, "world-size": self.workers, "local-rank": rank}
        if row.on_hub:
            flags["transport"] = self.transport
        if rank == 0:
            flags["save-parameters"] = place / "parameters.safetensors"
        command = [sys.executable, "-m", "workers.cli", *_spell(flags), *row.worker]
        return [*command, "--", *self.job_arguments]


def clean_environment(threads: int) -> dict[str, str]:
    """This process's variables without settings or launchers: the command lines say all of that.

    Args:
        threads: PyTorch's, in every process.
    """
    kept = {
        name: value
        for name, value in environment().items()
        if name not in _OF_TORCHRUN and not name.startswith(_OF_LAUNCHERS)
    }
    return kept | {"OMP_NUM_THREADS": str(threads)}


def await_address(processes: Processes, file: Path) -> str:
    """The address that a starting server writes into `file`; raises as `Processes.pause`."""
    while not file.exists() or not (address := file.read_text().strip()):
        processes.pause("the server's address")
    return address


def _spell(flags: Mapping[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]
