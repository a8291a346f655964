"""The settings of `ps-server submit` itself."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from hubring.ps.config.declaration import changed_settings, cluster, flag_words, only_with
from hubring.ps.config.values import Count, DirectiveLine, Duration, Image, JobName, Partition, Whole
from hubring.ps.core.errors import ConfigError


class SubmitConfig(Struct, frozen=True, kw_only=True):
    """The settings of `ps-server submit` itself, without the settings for the server and the workers.

    Raises:
        ConfigError: Two settings contradict each other. The message names both and suggests a fix.
    """

    engine: Annotated[
        Literal["slurm", "kubernetes", "compose"] | None, cluster("engine that runs the job; required")
    ] = None
    kind: Annotated[Literal["jobset", "trainjob"], cluster("kubernetes: a JobSet or a TrainJob")] = "jobset"
    workers: Annotated[Whole, cluster("number of workers", "one per GPU")] = 0
    nodes: Annotated[
        Count | None, cluster("hosts or pods; each runs the same number of workers", "chosen by the engine")
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
        Partition | None, cluster("slurm: comma-separated partitions; the job runs in one of them")
    ] = None
    requeue: Annotated[bool, cluster("restart the job after each preemption (exit code 75)")] = False
    restarts: Annotated[
        Whole | None,
        cluster("restarts after a loss, such as a killed process", "3 with --checkpoint-dir, else 0"),
    ] = None
    engine_option: Annotated[
        tuple[DirectiveLine, ...],
        cluster("slurm: one more directive, such as '#SBATCH --account=a'; repeatable"),
    ] = ()

    def __post_init__(self) -> None:
        if self.engine is None:
            raise ConfigError("--engine is missing; use slurm, kubernetes or compose")
        for name, value in changed_settings(self).items():
            engines = _OF_ENGINES.get(name, (self.engine,))
            if self.engine not in engines:
                given = " ".join(flag_words({name: value}))
                raise only_with(given, f"--engine {' or '.join(engines)}", f"--engine {self.engine}")
        if self.image is None and self.engine != "slurm":
            raise ConfigError(
                f"--engine {self.engine} needs --image NAME, an image with Hubring and your script"
            )
        self._check_layout()

    def _check_layout(self) -> None:
        if not self.workers and not self.gpus:
            raise ConfigError("--workers N is missing; set it, or set --gpus (and --nodes)")
        if self.nodes and self.workers % self.nodes:
            raise ConfigError(
                f"--workers {self.workers} is not a multiple of --nodes {self.nodes}; change one of the two"
            )
        if self.gpus and self.nodes and self.workers not in (0, self.nodes * self.gpus):
            raise ConfigError(
                f"--nodes {self.nodes} with --gpus {self.gpus} makes {self.nodes * self.gpus} workers, one"
                f" per GPU, but --workers is {self.workers}; remove one of the three"
            )
        if self.gpus and self.workers % self.gpus:
            raise ConfigError(
                f"--workers {self.workers} is not a multiple of --gpus {self.gpus}, and each GPU of a node"
                " needs one worker; change one of the two"
            )
        if self.engine == "compose" and self.gpus and self.workers not in (0, self.gpus):
            raise ConfigError(
                f"--engine compose uses one machine, so --gpus {self.gpus} makes {self.gpus} workers, but"
                f" --workers is {self.workers}; remove one of the two"
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
"""The engines that support each setting which not all of them support."""
