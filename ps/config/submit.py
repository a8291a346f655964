"""The settings of `ps-server submit` itself."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config.contradiction import only_with
from hubring.ps.config.declaration import cluster
from hubring.ps.config.kinds import Count, DirectiveLine, Duration, Image, JobName, Partition, Whole
from hubring.ps.config.settings import flag
from hubring.ps.core.errors import ConfigError


class SubmitConfig(Struct, frozen=True, kw_only=True):
    """What `ps-server submit` is told for itself; what is the server's or the workers' it passes on to them.

    Raises:
        ConfigError: Two settings contradict each other; says which and how to mend it.
    """

    engine: Annotated[
        Literal["slurm", "kubernetes", "compose"] | None, cluster("what runs the job; required")
    ] = None
    kind: Annotated[Literal["jobset", "trainjob"], cluster("kubernetes: a JobSet or a TrainJob")] = "jobset"
    workers: Annotated[Whole, cluster("number of workers", "one per GPU")] = 0
    nodes: Annotated[
        Count | None, cluster("hosts or pods that share the workers evenly", "up to the engine")
    ] = None
    gpus: Annotated[Whole, cluster("GPUs per node, one for each worker", "0; workers run on the CPU")] = 0
    cpus: Annotated[Count | None, cluster("cores per worker", "2 in a container, or SLURM's default")] = None
    memory: Annotated[
        Count | None, cluster("GiB of memory per worker", "4 in a container, or SLURM's default")
    ] = None
    job_name: Annotated[JobName, cluster("name of the job in the engine")] = "hubring"
    image: Annotated[Image | None, cluster("kubernetes, compose: image with Hubring and your script")] = None
    time: Annotated[Duration | None, cluster("time limit, [DAYS-]HH:MM:SS")] = None
    partition: Annotated[
        Partition | None, cluster("slurm: partitions, by comma; one of them takes the job")
    ] = None
    requeue: Annotated[bool, cluster("start the job again after a preemption (exit code 75)")] = False
    engine_option: Annotated[
        tuple[DirectiveLine, ...],
        cluster("slurm: one more directive, as in '#SBATCH --account=a'; repeatable"),
    ] = ()

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
