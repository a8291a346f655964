"""A worker's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct

from hubring.ps.config.declaration import (
    AuthorityFile,
    CertificateFile,
    KeyFile,
    TlsFiles,
    checkpoint,
    cluster,
    data_path,
    debugging,
    flag,
    only_with,
)
from hubring.ps.config.values import Bytes, Count, LogFormat, ReportTo, Seconds, Whole, address
from hubring.ps.core import types
from hubring.ps.core.errors import ConfigError


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """The settings of `ps-worker`, and of `hubring.init()` in a script that runs without it.

    Raises:
        ConfigError: Two settings contradict each other. The message names both and suggests a fix.
    """

    server: Annotated[str | None, cluster("HOST:PORT of the hub", "none; the worker trains alone")] = None
    token_file: Annotated[
        Path | None,
        cluster("file with the server's token", "that of this user's server on this host"),
    ] = None
    insecure: Annotated[
        bool,
        cluster("join a server with --insecure: any program at its address can read and change the model"),
    ] = False
    tls_cert: CertificateFile = None
    tls_key: KeyFile = None
    tls_ca: AuthorityFile = None
    topology: Annotated[
        Literal["hub", "ring"], data_path("train through a parameter server or an allreduce ring")
    ] = "hub"
    backend: Annotated[
        Literal["shm", "gloo", "nccl"] | None,
        data_path(
            "what runs the ring's allreduce: shared memory, Gloo or NCCL",
            "shm if all workers are on one host, else gloo",
        ),
    ] = None
    accelerator: Annotated[
        Literal["auto", "cpu", "cuda"],
        data_path(
            "what hubring.device() returns: cuda is this worker's own GPU; auto is cuda if this host has a"
            " GPU for each of its workers, else cpu"
        ),
    ] = "auto"
    aggregate: Annotated[
        bool, data_path("the hub averages gradients; each worker runs its own optimizer")
    ] = False
    local: Annotated[
        bool, data_path("sum gradients on each host first, so its link carries them once a step")
    ] = False
    compress: Annotated[
        str | None, data_path("gradient codec: bf16, fp16, int8, sign, topk:0.01 or powersgd:4", "none")
    ] = None
    transport: Annotated[
        Literal["auto", "shm", "zmq", "grpc", "zmq-tcp", "grpc-tcp"],
        data_path(
            "transport to the hub's shards; auto: the fastest that both ends support; -tcp: not by unix"
            " sockets on one host"
        ),
    ] = "auto"
    rank: Annotated[
        Whole | None, cluster("rank of this worker", "from the launcher, or assigned by the hub")
    ] = None
    world_size: Annotated[
        Count | None, cluster("number of workers", "from the launcher, or from the hub")
    ] = None
    local_rank: Annotated[
        Whole | None, cluster("rank among the workers on this host", "from the launcher, or 0")
    ] = None
    min_workers: Annotated[
        Count | None,
        cluster(
            "ring: continue without lost workers while this many are left, and let new ones join",
            "a ring ends with its first lost worker",
        ),
    ] = None
    as_horovod: Annotated[bool, cluster("replace `import horovod.torch` with Hubring")] = False
    as_gloo: Annotated[
        bool,
        cluster(
            "hub: be the backend of torch.distributed where a script asks for Gloo or for none, as DDP,"
            " Accelerate, Trainer and Lightning scripts do"
        ),
    ] = False
    nodes: Annotated[Count | None, cluster("with --gpus: number of hosts", "from the launcher, or 1")] = None
    gpus: Annotated[
        Count | None,
        cluster("start this many workers on this host, one per GPU, or on the CPU with --accelerator cpu"),
    ] = None
    nr: Annotated[Whole | None, cluster("with --gpus: index of this host", "from the launcher, or 0")] = None
    restarts: Annotated[
        Whole, cluster("restarts after a loss (exit codes 69 and 75, or a signal that kills)")
    ] = 0
    checkpoint_dir: Annotated[
        Path | None,
        checkpoint("ring, --aggregate or no server: folder where rank 0 saves checkpoints and resumes"),
    ] = None
    checkpoint_every: Annotated[Seconds, checkpoint("seconds between these checkpoints")] = 60.0
    # SIGUSR1 stops all workers, whatever this setting is.
    on_preempt: Annotated[
        Literal["auto", "all", "leave"],
        cluster("on SIGTERM: stop all workers, leave the job, or auto: do what the launcher does"),
    ] = "auto"
    job: Annotated[Literal["digits", "char-lm"], cluster("built-in job to train without a script")] = "digits"
    record: Annotated[Path | None, debugging("file for one JSON line per step")] = None
    report_to: Annotated[
        ReportTo | None,
        debugging(
            "also send rank 0's hubring.report(...) to TensorBoard or Weights & Biases: tensorboard:FOLDER or"
            " wandb:PROJECT"
        ),
    ] = None
    trace: Annotated[Path | None, debugging("folder for a Perfetto trace of this worker")] = None
    save_parameters: Annotated[Path | None, checkpoint("file for the last parameters, from rank 0")] = None
    save_parameters_at: Annotated[
        Count | None, checkpoint("also save the parameters after this many steps, in a file next to it")
    ] = None
    bucket_bytes: Annotated[
        Bytes | None, data_path("bytes of gradients exchanged together", "tuned in the first steps")
    ] = None
    timeout: Annotated[Seconds, cluster("time limit for an exchange or for the start, in seconds")] = 300.0
    hardship: Annotated[
        Path | None, debugging("experiments: JSON file with this worker's delays in each step", hidden=True)
    ] = None
    audit: Annotated[
        Path | None, debugging("comparisons: file for sampled elements of every step", hidden=True)
    ] = None
    log_format: Annotated[LogFormat, debugging("format of a log line")] = "text"

    def __post_init__(self) -> None:
        if self.server is None:
            self._check_alone()
        else:
            address(self.server)
        if self.topology == "ring":
            self._check_ring()
        elif self.backend == "nccl":
            raise only_with("--backend nccl", "--topology ring", "--topology hub")
        if self.backend == "nccl" and self.accelerator == "cpu":
            raise only_with("--backend nccl", "--accelerator cuda", "--accelerator cpu")
        if self.topology == "hub" and self.min_workers is not None:
            raise ConfigError(
                f"--min-workers {self.min_workers} is for --topology ring; a hub continues without a lost"
                " worker anyway, unless the server has --on-loss wait or --colocate"
            )
        if self.local:
            self._check_local()
        if self.compress is not None:
            self._check_compress(self.compress)
        self._check_nodes()
        self.tls.check(insecure=self.insecure)
        if self.save_parameters_at is not None and self.save_parameters is None:
            raise ConfigError(
                f"--save-parameters-at {self.save_parameters_at} needs --save-parameters FILE; the second"
                " file is written next to it"
            )
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ConfigError(
                f"--rank {self.rank} is outside --world-size {self.world_size}; ranks go from 0 to"
                f" {self.world_size - 1}"
            )

    @property
    def tls(self) -> TlsFiles:
        """The worker's own certificate."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    def _check_alone(self) -> None:
        if self.topology == "ring":
            raise ConfigError(
                "--topology ring needs --server HOST:PORT; the ring's members find each other there"
            )
        if self.world_size is not None and self.world_size > 1:
            raise ConfigError(
                f"--world-size {self.world_size} needs --server HOST:PORT; without a server, a worker trains"
                " alone"
            )

    def _check_nodes(self) -> None:
        if self.gpus is None:
            for name in ("nodes", "nr"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{flag(name)} {getattr(self, name)} needs --gpus N, the workers to start here"
                    )
            return
        for name in ("rank", "world_size", "local_rank"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{flag(name)} {getattr(self, name)} applies to one worker, but --gpus {self.gpus} starts"
                    f" {self.gpus} with ranks from --nodes, --gpus and --nr; remove one of the two"
                )
        if self.nr is not None and self.nodes is not None and self.nr >= self.nodes:
            raise ConfigError(
                f"--nr {self.nr} is outside --nodes {self.nodes}; nodes go from 0 to {self.nodes - 1}"
            )
        if self.server is None and self.gpus * (self.nodes or 1) > 1:
            raise ConfigError(
                f"--gpus {self.gpus} needs --server HOST:PORT; ps-server start prints the address"
            )

    def _check_local(self) -> None:
        if self.server is None or self.world_size == 1:
            raise ConfigError("--local needs --server HOST:PORT and more than one worker; remove --local")
        if self.backend == "nccl":
            raise ConfigError(
                "--local with --backend nccl is not built yet; remove --local, or use --backend gloo"
            )
        if self.backend == "shm":
            raise ConfigError(
                "--local is for workers on several hosts, and --backend shm needs all of them on one; remove"
                " one of the two"
            )
        if self.topology == "hub" and (self.compress or "").startswith("powersgd"):
            raise ConfigError(
                f"--local on a hub cannot add what --compress {self.compress} sends; use another codec, as"
                " int8, or remove one of the two"
            )

    def _check_compress(self, name: str) -> None:
        kind = types.parse_codec(name).kind
        if self.backend == "nccl":
            raise only_with(f"--compress {name}", "--backend gloo", "--backend nccl")
        if kind == "powersgd" and self.topology == "hub" and self.server and not self.aggregate:
            raise ConfigError(
                f"--compress {name} on a hub needs --aggregate, because its two rounds produce a mean for the"
                " worker's own optimizer; add --aggregate, or use another codec such as int8"
            )

    def _check_ring(self) -> None:
        if self.aggregate:
            raise only_with("--aggregate", "--topology hub", "--topology ring")
        if self.min_workers is not None:
            self._check_healing()
        if self.transport != "auto":
            raise only_with(f"--transport {self.transport}", "--topology hub", "--topology ring")

    def _check_healing(self) -> None:
        if self.compress is not None and types.parse_codec(self.compress).kind not in ("bf16", "fp16"):
            raise ConfigError(
                f"--compress {self.compress} keeps a residual of every step, and with --min-workers a step"
                " may be taken again; use --compress bf16 or fp16, or remove --min-workers"
            )
