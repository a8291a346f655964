"""The settings of `ps-server submit` itself."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config.contradiction import only_with
from hubring.ps.config.kinds import Count, DirectiveLine, Duration, Image, JobName, Partition, Whole
from hubring.ps.config.settings import flag
from hubring.ps.core.errors import ConfigError


class SubmitConfig(Struct, frozen=True, kw_only=True):
    """What `ps-server submit` is told for itself; what is the server's or the workers' it passes on to them.

    Raises:
        ConfigError: Two settings contradict each other; says which and how to mend it.
    """

    engine: Literal["slurm", "kubernetes", "compose"] | None = None
    """Who runs the job."""
    kind: Literal["jobset", "trainjob"] = "jobset"
    """On Kubernetes: JobSet's object, or Kubeflow Trainer's."""
    workers: Whole = 0
    """Workers of the job; 0: one a GPU, on `nodes` (else one) with `gpus` each."""
    nodes: Count | None = None
    """Hosts (on Kubernetes: pods) that share the workers evenly; None: as the engine places them."""
    gpus: Whole = 0
    """GPUs of each node, one for each of its workers; 0: workers on the CPU."""
    cpus: Count | None = None
    """Cores of each worker; None: SLURM's default, and 2 in a container."""
    memory: Count | None = None
    """GiB of memory of each worker, in a container of the server too; None: SLURM's default, and 4 there."""
    job_name: JobName = "hubring"
    """What the engine calls the job."""
    image: Image | None = None
    """Container image that holds this package and the script."""
    time: Duration | None = None
    """When the engine ends the job at the latest."""
    partition: Partition | None = None
    """SLURM's partitions, one of which takes the job."""
    requeue: bool = False
    """A job that was pre-empted (75) is started again, as often as that happens."""
    engine_option: tuple[DirectiveLine, ...] = ()
    """More `#SBATCH` lines, behind those that say the rest."""

    def __post_init__(self) -> None:
        if self.engine is None:
            raise ConfigError("--engine is missing: it is slurm, kubernetes or compose")
        for name, engines in _OF_ENGINES.items():
            value = getattr(self, name)
            if self.engine not in engines and value != _default(type(self), name):
                given = flag(name) if value is True else f"{flag(name)} {value}"
                raise only_with(given, f"--engine {' or '.join(engines)}", f"--engine {self.engine}")
        if self.image is None and self.engine != "slurm":
            raise ConfigError(
                f"--engine {self.engine} needs --image NAME: an image that holds this package and the script"
            )
        self._check_layout()

    def _check_layout(self) -> None:
        if not self.workers and not self.gpus:
            raise ConfigError("--workers N is missing: how many, unless --gpus (and --nodes) say it")
        if self.nodes and self.workers % self.nodes:
            raise ConfigError(
                f"--workers {self.workers} cannot be shared evenly by --nodes {self.nodes}:"
                " change one of the two"
            )
        if self.gpus and self.nodes and self.workers not in (0, self.nodes * self.gpus):
            raise ConfigError(
                f"--nodes {self.nodes} with --gpus {self.gpus} make {self.nodes * self.gpus} workers,"
                f" one a GPU, and --workers says {self.workers}: drop one of the three"
            )
        if self.gpus and self.workers % self.gpus:
            raise ConfigError(
                f"--workers {self.workers} do not fill nodes of --gpus {self.gpus}, one worker a GPU:"
                " change one of the two"
            )
        if self.engine == "compose" and self.gpus and self.workers not in (0, self.gpus):
            raise ConfigError(
                f"--engine compose has one machine: --gpus {self.gpus} there take as many workers,"
                f" and --workers says {self.workers}: drop one of the two"
            )


_OF_ENGINES = {
    "kind": ("kubernetes",),
    "nodes": ("slurm", "kubernetes"),
    "image": ("kubernetes", "compose"),
    "time": ("slurm", "kubernetes"),
    "partition": ("slurm",),
    "requeue": ("slurm", "kubernetes"),
    "engine_option": ("slurm",),
}
"""Which engines have what not all of them have."""


def _default(kind: type[Struct], name: str) -> object:
    return next(field.default for field in fields(kind) if field.name == name)
