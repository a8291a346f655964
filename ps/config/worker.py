"""A worker's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from hubring.ps.config.address import address
from hubring.ps.config.contradiction import only_with
from hubring.ps.config.kinds import Bytes, Count, LogFormat, Seconds, Whole
from hubring.ps.config.settings import flag
from hubring.ps.core import codecs
from hubring.ps.core.errors import ConfigError


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """What `ps-worker`, or `hubring.init()` in a script of its own, is told.

    Raises:
        ConfigError: Two settings contradict each other; says which and how to mend it.
    """

    server: str | None = None
    """Coordinator's `HOST:PORT`; None trains alone."""
    topology: Literal["hub", "ring"] = "hub"
    """Through the parameter server, or around an allreduce ring."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What carries the ring."""
    aggregate: bool = False
    """The hub only averages, and this worker's own optimizer steps."""
    compress: str | None = None
    """What gradients are compressed with: bf16, fp16, int8, sign, topk:F or powersgd:R; None: nothing."""
    transport: Literal["auto", "shm", "zmq", "grpc"] = "auto"
    """Wire to the hub's shards; auto takes the fastest that both ends share."""
    rank: Whole | None = None
    """This worker's rank; None: as the launcher says, else as the server assigns."""
    world_size: Count | None = None
    """How many workers there are; None: as the launcher says, else as the server says."""
    local_rank: Whole | None = None
    """This worker's rank among those on its host; None: as the launcher says, else 0."""
    as_horovod: bool = False
    """Make `import horovod.torch` in the script mean `hubring.workers.horovod`."""
    nodes: Count | None = None
    """With `gpus`: how many hosts there are; None: as the launcher says, else 1."""
    gpus: Count | None = None
    """Start so many workers on this host instead of being one: one a GPU, or as many processes on the CPU."""
    nr: Whole | None = None
    """With `gpus`: which of the hosts this is; None: as the launcher says, else 0."""
    checkpoint_dir: Path | None = None
    """Where rank 0 keeps what no hub does: the model and optimizer of workers that step themselves."""
    checkpoint_every: Seconds = 60.0
    """Seconds from one such checkpoint to the next."""
    on_preempt: Literal["auto", "all", "leave"] = "auto"
    """SIGTERM: all workers stop after a common step, or this one leaves; auto: all where the launcher stops
    all of them. SIGUSR1 always stops all."""
    job: Literal["digits", "char-lm"] = "digits"
    """Built-in job to train where no script is given."""
    record: Path | None = None
    """File to which every step is written, one JSON object a line."""
    trace: Path | None = None
    """Folder for a trace of this worker's steps and exchanges, which Perfetto loads; None writes none."""
    save_parameters: Path | None = None
    """File to which the last parameters are written."""
    save_parameters_at: Count | None = None
    """Write those after so many steps too, into a file beside it: NAME step20.safetensors, say."""
    bucket_bytes: Bytes | None = None
    """How much gradient is exchanged together, in bytes; None: found out by trying, in the first steps."""
    timeout: Seconds = 300.0
    """Seconds that one exchange, or the start of the job, may take."""
    hardship: Path | None = None
    """For experiments: JSON file with this worker's sleep in each step (`workers/slowdown`)."""
    log_format: LogFormat = "text"
    """How a line of the log looks."""

    def __post_init__(self) -> None:
        if self.server is None:
            self._check_alone()
        else:
            address(self.server)
        if self.topology == "ring":
            self._check_ring()
        elif self.backend == "nccl":
            raise only_with("--backend nccl", "--topology ring", "--topology hub")
        if self.compress is not None:
            self._check_compress(self.compress)
        self._check_nodes()
        if self.save_parameters_at is not None and self.save_parameters is None:
            raise ConfigError(
                f"--save-parameters-at {self.save_parameters_at} needs --save-parameters FILE,"
                " beside which they are written"
            )
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ConfigError(
                f"--rank {self.rank} of --world-size {self.world_size}: ranks go from 0 to "
                f"{self.world_size - 1}"
            )

    def _check_alone(self) -> None:
        if self.topology == "ring":
            raise ConfigError("--topology ring needs --server HOST:PORT: the ring's members meet there")
        if self.world_size is not None and self.world_size > 1:
            raise ConfigError(
                f"--world-size {self.world_size} needs --server HOST:PORT: without it a worker is alone"
            )

    def _check_nodes(self) -> None:
        if self.gpus is None:
            for name in ("nodes", "nr"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{flag(name)} {getattr(self, name)} needs --gpus: how many workers this host starts"
                    )
            return
        for name in ("rank", "world_size", "local_rank"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{flag(name)} {getattr(self, name)} is for one worker, and --gpus {self.gpus} starts"
                    f" {self.gpus}, whose ranks follow from --nodes, --gpus and --nr: drop one of the two"
                )
        if self.nr is not None and self.nodes is not None and self.nr >= self.nodes:
            raise ConfigError(f"--nr {self.nr} of --nodes {self.nodes}: nodes go from 0 to {self.nodes - 1}")
        if self.server is None and self.gpus * (self.nodes or 1) > 1:
            raise ConfigError(
                f"--gpus {self.gpus} needs --server HOST:PORT, where workers meet: ps-server start prints it"
            )

    def _check_compress(self, name: str) -> None:
        kind = codecs.parse(name).kind
        if self.backend == "nccl":
            raise only_with(f"--compress {name}", "--backend gloo", "--backend nccl")
        if kind == "powersgd" and self.topology == "hub" and self.server and not self.aggregate:
            raise ConfigError(
                f"--compress {name} on a hub needs --aggregate: its two rounds end in a mean, which the"
                " worker's own optimizer applies. Add --aggregate, or take another codec, such as int8"
            )

    def _check_ring(self) -> None:
        if self.aggregate:
            raise only_with("--aggregate", "--topology hub", "--topology ring")
        if self.transport != "auto":
            raise only_with(f"--transport {self.transport}", "--topology hub", "--topology ring")
