"""The programs of a run as command lines, ours and those of peers.

All of their options are on the command line. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from hubring.ps.config.declaration import flag_words
from hubring.ps.config.values import is_loopback
from hubring.ps.process.launch import module_command
from hubring.workers.compare.plan.experiment import PLACEHOLDER, Experiment
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.conductor import Conductor
from hubring.workers.compare.run.outcome import EARLY, audit_file
from hubring.workers.compare.run.site import LocalHosts
from hubring.workers.peers.rows import PeerRow, mpirun

Hosts = LocalHosts | Conductor
"""The hosts of programs."""


class Program(NamedTuple):
    """A program to start: its name among the run's processes, and its command line."""

    name: str
    argv: list[str]


class PeerPrograms(Struct, frozen=True):
    """The programs of one run of a peer.

    Attributes:
        row: The peer.
        size: Number of workers.
        servers: Number of servers, if the peer has any; Ray's actor is one.
        folder: The run's folder; an absolute path without a file `meet`.
        hosts: Hosts of the programs.
        backend: Backend of torch's process group.
    """

    row: PeerRow
    size: int
    folder: Path
    hosts: Hosts
    servers: int = 1
    backend: str = "gloo"

    @property
    def meet(self) -> Path:
        """File through which all find each other. With `row.leads`, workers start once it exists."""
        return self.folder / "meet"

    def server_programs(self) -> list[Program]:
        """Returns the servers, which must start first; empty for a peer without servers."""
        count = (1 if self.row.leads else self.servers) if self.row.served else 0
        return [self._server(number, count) for number in range(count)]

    def worker_programs(self, words: Callable[[int], Sequence[str]]) -> list[Program]:
        """Returns the workers: one program each, or one for all under mpirun.

        Args:
            words: Returns a rank's flags of `ps-worker` (record, save-parameters and so on) and the job, as
                `--job NAME -- ARGS` or `SCRIPT ARGS`, without rank, size, server and backend.
        """
        argvs = [self._worker(rank, words(rank)) for rank in range(self.size)]
        if self.row.launched:
            return [Program("workers", self._launched(argvs))]
        return [Program(f"worker {rank}", argv) for rank, argv in enumerate(argvs)]

    def result(self, rank: int) -> Mapping[str, Any]:
        """Returns a worker's last line once all have ended."""
        line: dict[str, Any] = json.loads(self._result(rank).read_text())
        return line

    def _server(self, number: int, count: int) -> Program:
        role = "server" if number == 0 else f"shard {number}"
        return Program(role, self._command(role, self.row.serve(self.size, self.meet, number, count)))

    def _worker(self, rank: int, words: Sequence[str]) -> list[str]:
        role = f"worker {rank}"
        flags = {"peer": self.row.name, "rank": rank, "world-size": self.size}
        flags |= {"meet": self.meet, "result": self._result(rank), "servers": len(self.server_programs())}
        if not self.row.launched:  # mpirun sets it
            flags["local-rank"] = self.hosts.local_rank(rank)
        if self.row.grouped:
            flags["backend"] = self.backend
        return self._command(role, ["hubring.workers.compare.run.peers.run", *flag_words(flags)], words)

    def _launched(self, argvs: Sequence[Sequence[str]]) -> list[str]:
        if not self.hosts.apart:
            return mpirun(argvs)
        # Ranks report to mpirun over loopback by default, which hosts do not share.
        reached = f"PMIX_MCA_ptl_base_if_include={self.hosts.address('server')}/31"  # PMIx 4 makes /32 of all
        variables = ["env", "PMIX_MCA_ptl_base_remote_connections=1", reached]
        return self.hosts.command("server", [*variables, *mpirun(argvs)])

    def _command(self, role: str, module: Sequence[str], words: Sequence[str] = ()) -> list[str]:
        host = ["--host", self.hosts.address(role)] if self.hosts.apart else []
        return self.hosts.command(role, module_command(*module, *host, *words))

    def _result(self, rank: int) -> Path:
        return self.folder / f"result {rank}.json"


class Programs(Struct, frozen=True):
    """The programs of one run.

    Attributes:
        experiment: The experiment.
        run: The run.
        folder: The run's folder.
        hosts: Hosts of the programs.
        port: A free port of worker 0's host, for a group of the script's own.
    """

    experiment: Experiment
    run: PlannedRun
    folder: Path
    hosts: Hosts
    port: int = 0

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
            flags["shards"] = setting.servers - self.apart if row.on_hub else 0
        if self.experiment.slice_bytes is not None:
            flags["slice-bytes"] = self.experiment.slice_bytes
        words = flag_words({**flags, "address-file": self.address_file, "trace": self.traces})
        return self._server(
            "server", "start", "--once", "--no-page", *self._listening("server"), *words, *row.server
        )

    def shard(self, number: int, server: str) -> list[str]:
        """Returns the command of a shard on another host."""
        role = f"shard {number}"
        flags = flag_words({"shards": 1, "trace": self.traces})
        return self._server(role, "start", "--join", server, *flags, *self._listening(role))

    def status(self, server: str) -> list[str]:
        """Returns the command that prints the server's status."""
        return self._server("server", "status", server, *self._plain("server"))

    def _server(self, role: str, *words: str) -> list[str]:
        return self.hosts.command(role, module_command("hubring.ps.cli", *words))

    def worker(self, rank: int, server: str | None) -> list[str]:
        """Returns the command of a worker."""
        flags = self._written(rank)
        if server is not None:
            local = self.hosts.local_rank(rank)
            flags |= {"server": server, "rank": rank, "world-size": self.workers, "local-rank": local}
        if self.run.row.on_hub:
            if not self.run.row.transport:
                flags["transport"] = self._transport()
        elif server is not None and self.experiment.backend == "nccl":
            flags["backend"] = "nccl"
        plain = [] if server is None else self._plain("server")
        # Rows must not differ in devices.
        flags["accelerator"] = "cuda" if self.experiment.backend == "nccl" else "cpu"
        words = [*flag_words(flags), *plain, *self.run.row.worker, *self._job()]
        program = ["hubring.workers.programs.ps_worker"]
        if self.run.row.unedited:
            watched = {"peer": self.run.row.name, **self._watched()}
            program = ["hubring.workers.compare.run.peers.run", *flag_words(watched)]
        return self.hosts.command(f"worker {rank}", module_command(*program, *words))

    @property
    def peers(self) -> PeerPrograms:
        """The programs of a peer."""
        peer, setting = self.run.row.peer, self.run.setting
        assert peer is not None
        backend = self.experiment.backend
        return PeerPrograms(peer, self.workers, self.folder, self.hosts, setting.servers, backend)

    def peer_words(self, rank: int) -> list[str]:
        """Returns the arguments that a peer's worker shares with ours."""
        watched = self._watched() if self.run.row.name == "ddp" else {}
        return [*flag_words(self._written(rank) | watched), *self._job()]

    def _watched(self) -> dict[str, object]:
        """Returns flags for a script that can have a group of its own."""
        asked = self.experiment
        flags = {"metric_regex": asked.metric_regex, "samples_per_step": asked.samples_per_step}
        known = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
        master = f"{self.hosts.address('worker 0')}:{self.port}"
        return {"master": master, "metric": asked.yardstick.metric, **known}

    @property
    def hardship(self) -> Path:
        """File that defines how long workers sleep."""
        return self.folder / "hardship.json"

    def write_hardship(self) -> None:
        """Writes that file if the setting emulates anything."""
        if self.run.setting.emulated:
            self.hardship.write_bytes(msgspec.json.encode(self.run.slowness))

    def _written(self, rank: int) -> dict[str, object]:
        """Returns flags for a worker's output and slowness, in any row."""
        flags: dict[str, object] = {"record": self.record(rank), "trace": self.traces}
        flags["audit"] = audit_file(self.folder, rank)
        if rank == 0:
            flags["save-parameters"] = self.folder / "parameters.safetensors"
            flags["save-parameters-at"] = EARLY
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
        flags = flag_words({name: value for name, value in renamed.items() if value is not None})
        return ["--job", str(self.experiment.job), "--", *flags, *self.experiment.arguments]


def _filled(word: str, given: Mapping[str, Any]) -> str:
    return PLACEHOLDER.sub(lambda found: str(given[found[1]]), word)
