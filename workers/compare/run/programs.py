"""The programs of a run as command lines. All of their options are on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hubring.ps.config.address import is_loopback
from hubring.ps.process.command import module_command
from hubring.workers.compare.experiment.experiment import PLACEHOLDER, Experiment
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.peers.programs import Hosts, PeerPrograms
from hubring.workers.compare.run.outcome import EARLY, audit_file
from hubring.workers.slowdown.delays import Slowness


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one run.

    Attributes:
        experiment: The experiment.
        run: The run.
        folder: The run's folder.
        hosts: Hosts of the programs.
    """

    experiment: Experiment
    run: Run
    folder: Path
    hosts: Hosts

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.run.row.workers(self.run.setting.workers)

    @property
    def apart(self) -> int:
        """Number of shards on other hosts than the server's."""
        return self.run.setting.servers - 1 if self.hosts.apart and not self.run.row.colocated else 0

    def record(self, rank: int) -> Path:
        """Returns the file of a worker's reports."""
        return self.folder / f"record {rank}.jsonl"

    @property
    def parameters(self) -> Path:
        """File of the final parameters."""
        return self.folder / "parameters.safetensors"

    @property
    def traces(self) -> Path:
        """Folder of the traces of all processes, which become one timeline."""
        return self.folder / "traces"

    @property
    def address_file(self) -> Path:
        """File into which the server writes its address."""
        return self.folder / "address"

    def server(self) -> list[str]:
        """Returns the command of the coordinator and the shards on its host."""
        row, setting = self.run.row, self.run.setting
        assert row.server is not None
        flags: dict[str, object] = {"port": 0, "workers": setting.workers}
        if not row.colocated:
            flags["shards"] = setting.servers - self.apart
        if self.experiment.slice_bytes is not None:
            flags["slice-bytes"] = self.experiment.slice_bytes
        words = _spell({**flags, "address-file": self.address_file, "trace": self.traces})
        words = ["start", "--once", "--no-page", *self._listening("server"), *words, *row.server]
        return self.hosts.command("server", module_command("hubring.ps.cli", *words))

    def shard(self, number: int, server: str) -> list[str]:
        """Returns the command of a shard on another host."""
        role = f"shard {number}"
        flags = _spell({"shards": 1, "trace": self.traces})
        words = ["start", "--join", server, *flags, *self._listening(role)]
        return self.hosts.command(role, module_command("hubring.ps.cli", *words))

    def status(self, server: str) -> list[str]:
        """Returns the command that prints the server's status."""
        return self.hosts.command(
            "server", module_command("hubring.ps.cli", "status", server, *self._plain("server"))
        )

    def worker(self, rank: int, server: str | None) -> list[str]:
        """Returns the command of a worker."""
        flags = self._written(rank)
        if server is not None:
            local = self.hosts.local_rank(rank)
            flags |= {"server": server, "rank": rank, "world-size": self.workers, "local-rank": local}
        if self.run.row.on_hub:
            if not self.run.row.wired:
                flags["transport"] = self._transport()
        elif server is not None:
            flags["backend"] = self.experiment.backend
        plain = [] if server is None else self._plain("server")
        gpu = ["--own-gpu"] if self.experiment.backend == "nccl" else []  # rows must not differ in devices
        words = [*_spell(flags), *gpu, *plain, *self.run.row.worker, *self._job()]
        return self.hosts.command(
            f"worker {rank}", module_command("hubring.workers.programs.ps_worker", *words)
        )

    @property
    def peers(self) -> PeerPrograms:
        """The programs of a peer."""
        peer, setting = self.run.row.peer, self.run.setting
        assert peer is not None
        return PeerPrograms(
            peer,
            self.workers,
            self.folder,
            self.hosts,
            servers=setting.servers,
            backend=self.experiment.backend,
        )

    def peer_words(self, rank: int) -> list[str]:
        """Returns the arguments that a peer's worker shares with ours."""
        return [*_spell(self._written(rank)), *self._job()]

    @property
    def hardship(self) -> Path:
        """File that defines how long workers sleep."""
        return self.folder / "hardship.json"

    def write_hardship(self) -> None:
        """Writes that file if the setting emulates anything."""
        setting = self.run.setting
        if setting.emulated:
            slowness = Slowness(setting.straggler, setting.compute_of(self.workers), self.run.seed)
            self.hardship.write_bytes(msgspec.json.encode(slowness))

    def _written(self, rank: int) -> dict[str, object]:
        """Returns flags for a worker's output and slowness, in any row."""
        flags: dict[str, object] = {"record": self.record(rank), "trace": self.traces}
        flags["audit"] = audit_file(self.folder, rank)
        if rank == 0:
            flags |= {"save-parameters": self.parameters, "save-parameters-at": EARLY}
        if self.run.setting.emulated:
            flags["hardship"] = self.hardship
        return flags

    def _transport(self) -> str:
        # Network namespaces share the machine's memory, so shared memory would bypass the link.
        wired = self.run.setting.link is not None and self.experiment.transport == "auto"
        return "zmq" if wired else self.experiment.transport

    def _listening(self, role: str) -> list[str]:
        return ["--host", self.hosts.address(role), *self._plain(role)]

    def _plain(self, role: str) -> list[str]:
        # Rings and the rows of others are not encrypted: encryption would put only the hub at a disadvantage.
        return [] if is_loopback(self.hosts.address(role)) else ["--insecure"]

    def _job(self) -> list[str]:
        rate = self.experiment.rate_for(self.run.row, self.run.setting.workers)
        given = {"seed": self.run.seed, "epochs": self.experiment.epochs, "lr": rate}
        given["batch"] = self.experiment.batch
        if self.experiment.script is not None:
            words = [_filled(word, given) for word in self.experiment.arguments]
            return [str(self.experiment.script), *words]
        renamed = {"batch-size" if name == "batch" else name: value for name, value in given.items()}
        flags = _spell({name: value for name, value in renamed.items() if value is not None})
        return ["--job", str(self.experiment.job), "--", *flags, *self.experiment.arguments]


def _filled(word: str, given: Mapping[str, Any]) -> str:
    return PLACEHOLDER.sub(lambda found: str(given[found[1]]), word)


def _spell(flags: Mapping[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]
