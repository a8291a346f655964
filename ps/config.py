"""Every setting of every program, and the only reader of the environment.

A setting comes from the strongest place that gives it:

    flags  >  PS_* in the environment  >  [server] or [worker] in a TOML file  >  defaults

`--checkpoint-dir`, `PS_CHECKPOINT_DIR` and `checkpoint_dir` name the same field.
A config that exists is consistent: contradictions are refused where it is made.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import fields

from ps import codecs, settings
from ps.errors import ConfigError
from ps.settings import flag, origins, settle

Port = Annotated[int, Meta(ge=0, le=65535, description="a port from 0 to 65535; 0 takes a free one")]
Count = Annotated[int, Meta(ge=1, description="a whole number, at least 1")]
Whole = Annotated[int, Meta(ge=0, description="a whole number, at least 0")]
Bytes = Annotated[int, Meta(ge=8, description="bytes, at least 8")]
Seconds = Annotated[float, Meta(gt=0, le=1e7, description="seconds, above 0 and at most 1e7")]
LogFormat = Literal["text", "json"]
DeviceName = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$", description="cpu, cuda or cuda:N")]
JobName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z",
        description="at most 40 lower-case letters, digits and -, beginning with a letter",
    ),
]
Image = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*\Z", description="an image, as in registry.example/hubring:1"
    ),
]
Partition = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.,-]+\Z", description="names of partitions, with commas between them")
]
Duration = Annotated[
    str,
    Meta(
        pattern=r"^(?![-0:]+\Z)([0-9]{1,3}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]\Z",
        description="[DAYS-]HOURS:MINUTES:SECONDS, as in 1-12:00:00",
    ),
]
DirectiveLine = Annotated[
    str, Meta(pattern=r"^#SBATCH --[^\r\n]+\Z", description="one line that begins with #SBATCH --")
]


class ServerConfig(Struct, frozen=True, kw_only=True):
    """What `ps-server start` is told.

    Raises:
        ConfigError: Two settings contradict each other; says which and how to mend it.
    """

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs `insecure`."""
    port: Port = 5555
    """Port of the control service; 0 takes a free one, and the banner names it."""
    page_port: Port | None = None
    """Port of the status page and the metrics, over HTTP; None: the one after `port`, or a free one where
    that is 0."""
    no_page: bool = False
    """Serve neither page nor metrics."""
    token_file: Path | None = None
    """File that holds the token for the page's buttons; None: drawn at the start, and the banner shows it."""
    shards: Whole = 1
    """Shard processes to start on this host; 0 where others bring all of them."""
    await_shards: Whole = 0
    """Shards of other hosts (`join`) that a job waits for, besides this host's own."""
    colocate: bool = False
    """Start none: each worker brings one, on its own host."""
    workers: Whole = 0
    """Workers that the job needs, spare ones included; 0: as their launcher says, else 1."""
    mode: Literal["bsp", "asp", "ssp", "backup"] = "bsp"
    """When a gradient is applied and parameters may be read: see `ps.consistency`."""
    staleness: Whole = 0
    """Under ssp: steps by which the fastest worker may lead the slowest."""
    backup: Whole = 0
    """Under backup: how many of the workers a round does not wait for."""
    nonfinite: Literal["refuse", "allow"] = "refuse"
    """A gradient is NaN or infinite where the hub steps: end the job before anybody has it, or apply it."""
    checkpoint_dir: Path | None = None
    """Where checkpoints are written, and looked for at the start; None writes none."""
    checkpoint_every: Seconds = 60.0
    """Seconds from one checkpoint to the next."""
    once: bool = False
    """End the server when its first job ends."""
    join: str | None = None
    """Coordinator (`HOST:PORT`) that this host's shards serve, instead of a new one."""
    on_loss: Literal["drop", "wait"] = "drop"
    """A worker is lost: go on with the others, or give it 1.5 leases to return before the job fails."""
    lease: Seconds = 8.0
    """Seconds of silence after which a worker counts as lost."""
    insecure: bool = False
    """Listen beyond loopback though nobody is asked for credentials."""
    address_file: Path | None = None
    """File into which the server writes its address once it listens."""
    slice_bytes: Bytes | None = None
    """Largest piece in which a bucket travels and is spread over the shards, in bytes; None: as in the
    checkpoint, else the workers find out by trying, before training begins."""
    device: DeviceName = "cpu"
    """Where this host's shards keep parameters and step them: cpu, cuda or cuda:N."""
    trace: Path | None = None
    """Folder for a trace of what this host's shards do, which Perfetto loads; None writes none."""
    log_format: LogFormat = "text"
    """How a line of the log looks."""

    def __post_init__(self) -> None:
        self._check_mode()
        self._check_page()
        self._check_shards()
        if not is_loopback(self.host) and not self.insecure:
            raise ConfigError(
                f"--host {self.host} is reachable from other machines, and workers are not asked for "
                "credentials yet: anybody there could read or change the model. Listen on 127.0.0.1, "
                "or add --insecure where the network itself is trusted"
            )
        if self.join is not None:
            self._check_join(self.join)

    def _check_mode(self) -> None:
        if self.staleness and self.mode != "ssp":
            raise _only_with(f"--staleness {self.staleness}", "--mode ssp", f"--mode {self.mode}")
        if self.backup and self.mode != "backup":
            raise _only_with(f"--backup {self.backup}", "--mode backup", f"--mode {self.mode}")
        if self.mode == "backup" and not self.backup:
            raise ConfigError("--mode backup needs --backup B: how many workers a round does not wait for")
        if self.workers and self.backup >= self.workers:
            raise ConfigError(
                f"--backup {self.backup} of --workers {self.workers} leaves no gradient to wait for: "
                f"at most {self.workers - 1}"
            )

    def _check_page(self) -> None:
        for name in ("page_port", "token_file"):
            given = getattr(self, name)
            if self.no_page and given is not None:
                raise ConfigError(
                    f"{flag(name)} {given} is for the status page, and --no-page serves none: drop one of"
                    " the two"
                )
        if self.port and self.page_port == self.port:
            raise ConfigError(
                f"--page-port {self.page_port} is the control port: give another, or drop it for the one"
                " after"
            )

    def _check_shards(self) -> None:
        if self.colocate and self.device != "cpu":
            raise ConfigError(
                f"--device {self.device} is for the shards of this host, and under --colocate each worker"
                " brings one to its own, which keeps its part on the CPU: drop one of the two"
            )
        if self.colocate and self.shards != 1 and self.join is None:
            raise ConfigError(
                f"--shards {self.shards} starts shards on this host, and under --colocate each worker brings"
                " one to its own: drop one of the two"
            )
        if self.colocate and self.await_shards:
            raise ConfigError(
                f"--await-shards {self.await_shards} waits for shards of other hosts, and under --colocate"
                " the workers bring all there are: drop one of the two"
            )
        if self.shards == 0 and self.join is not None:
            raise ConfigError(
                f"--shards 0 brings nothing to the hub at {self.join}: give --shards 1 or more,"
                " or drop --join"
            )
        if self.shards == 0 and not self.await_shards:
            raise ConfigError(
                "--shards 0 leaves nobody to hold the parameters: give --shards 1 or more,"
                " or --await-shards N for those that other hosts bring with --join"
            )

    def _check_join(self, coordinator: str) -> None:
        there, _ = address(coordinator)
        for field in fields(self):
            if field.name not in _SHARD_HOST and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{flag(field.name)} is the coordinator's to say, and this host joins the one at "
                    f"{coordinator}: give it there, or drop --join"
                )
        if is_loopback(self.host) and not is_loopback(there):
            raise ConfigError(
                f"shards on --host {self.host} cannot be reached from {coordinator}:"
                " give --host with this machine's address, and --insecure"
            )


_SHARD_HOST = {"join", "host", "shards", "device", "insecure", "trace", "log_format"}
"""What a host that only adds shards may be told; all else belongs to the coordinator."""


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """What `ps-worker`, or `workers.init()` in a script of its own, is told.

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
    """Make `import horovod.torch` in the script mean `workers.horovod`."""
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
    """For experiments: JSON file that says how long this worker sleeps in each step (`workers.hardship`)."""
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
            raise _only_with("--backend nccl", "--topology ring", "--topology hub")
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
            raise _only_with(f"--compress {name}", "--backend gloo", "--backend nccl")
        if kind == "powersgd" and self.topology == "hub" and self.server and not self.aggregate:
            raise ConfigError(
                f"--compress {name} on a hub needs --aggregate: its two rounds end in a mean, which the"
                " worker's own optimizer applies. Add --aggregate, or take another codec, such as int8"
            )

    def _check_ring(self) -> None:
        if self.aggregate:
            raise _only_with("--aggregate", "--topology hub", "--topology ring")
        if self.transport != "auto":
            raise _only_with(f"--transport {self.transport}", "--topology hub", "--topology ring")


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
                raise _only_with(given, f"--engine {' or '.join(engines)}", f"--engine {self.engine}")
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


def load_server(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Settles the server's settings.

    Args:
        flags: Field name to what the command line gave; None where it gave nothing.
        config_file: TOML file; None: the one that PS_CONFIG names, if any.
        environment: Instead of the process's own.

    Raises:
        ConfigError: Names the place, the value, what was allowed and the mend.
    """
    return ServerConfig(**settle("server", _TABLES, flags, config_file, _given(environment)))


def load_worker(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> WorkerConfig:
    """Settles a worker's settings; arguments and errors as of `load_server`."""
    return WorkerConfig(**settle("worker", _TABLES, flags, config_file, _given(environment)))


def load_submit(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> SubmitConfig:
    """Settles what `submit` is told for itself; arguments and errors as of `load_server`."""
    return SubmitConfig(**settle("submit", _TABLES, flags, config_file, _given(environment)))


def server_origins(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where each of the server's settings comes from that is no default; arguments and errors as above."""
    return origins("server", _TABLES, flags, config_file, _given(environment))


def worker_origins(
    flags: Mapping[str, object],
    config_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where each of a worker's settings comes from that is no default; arguments and errors as above."""
    return origins("worker", _TABLES, flags, config_file, _given(environment))


def faults(variables: Mapping[str, str]) -> dict[str, str]:
    """What is wrong with each variable of ours by itself, by its name: unknown, empty, or of a bad value."""
    return settings.faults(_TABLES, variables)


def environment() -> dict[str, str]:
    """A copy of the process's environment, for whoever looks for a launcher or starts a process."""
    return dict(os.environ)


def become(variables: Mapping[str, str]) -> None:
    """Makes `variables` this process's environment: for a fork that stands for a fresh process."""
    os.environ.clear()
    os.environ.update(variables)


def export(variables: Mapping[str, str]) -> None:
    """Adds to this process's environment what a script expects to find there."""
    os.environ.update(variables)


def spare_forks() -> None:
    """Keeps gRPC from stopping its threads at every fork, unless the environment says otherwise.

    A DataLoader's workers are forks, and none of them speaks gRPC. gRPC reads
    this when it is first imported, so that must come later.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def rest_threads() -> None:
    """Lets torch's threads sleep between loops, unless the environment says otherwise.

    They would look for work for some milliseconds after each. libgomp reads
    this when torch is first imported, so that must come later; a child inherits it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def address(text: str) -> tuple[str, int]:
    """Splits `HOST:PORT`; an IPv6 host stands in brackets, as in `[::1]:5555`.

    Raises:
        ConfigError: `text` is no such pair, or its port is not from 1 to 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ConfigError(
            f"address {text!r}: expected HOST:PORT with a port from 1 to 65535, "
            "as in 127.0.0.1:5555 or [::1]:5555"
        )
    return match["six"] or match["name"], int(match["port"])


_ADDRESS = re.compile(r"(\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<name>[^\[\]:/@\s]+)):(?P<port>[0-9]{1,5})")
_TABLES: Mapping[str, type[ServerConfig | WorkerConfig | SubmitConfig]] = {
    "server": ServerConfig,
    "worker": WorkerConfig,
    "submit": SubmitConfig,
}


def _given(variables: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if variables is None else variables


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _default(kind: type[Struct], name: str) -> object:
    return next(field.default for field in fields(kind) if field.name == name)


def _only_with(given: str, needed: str, present: str) -> ConfigError:
    return ConfigError(f"{given} means something only with {needed}, but there is {present}: drop one")
