"""The parts of a submitted job that are the same on every engine.

The settings of the server and of the workers are checked by their own configs and passed to their own
commands. The engine sets the server's address, the workers' ranks, and where their tokens are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config.declaration import changed_settings, flag, flag_words, only_with
from hubring.ps.config.environment import environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.sources import load, load_server, load_worker, server_origins, worker_origins
from hubring.ps.config.submit import SubmitConfig
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError

PORT = 5555
"""The server's port, if the job has its own network."""
GRACE_SECONDS = 120
"""Time in seconds between the stop request and the kill, in which the job writes a checkpoint."""

CPUS = 2
MEMORY_GIB = 4
"""Defaults for a worker or a server in a container, without --cpus and --memory."""

RESTARTS = 3
"""How often a job with checkpoints restarts after a loss if --restarts is not set."""

_PROOF = frozenset({"token_file", "tls_cert", "tls_key", "tls_ca"})
_SERVERS_PLACE = _PROOF | {
    *("host", "port", "insecure", "once", "join", "address_file", "workers", "restarts"),
}
_WORKERS_PLACE = _PROOF | {
    *("server", "insecure", "rank", "world_size", "local_rank", "nodes", "gpus", "nr", "restarts"),
}
"""Settings that follow from the engine and the job's size; the user must not set them."""
_HUBS = ("mode", "staleness", "backup", "shards", "colocate", "await_shards", "device", "slice_bytes")
"""Settings that a ring's server ignores."""
_CHECKPOINT_FLAGS = ("checkpoint_dir", "checkpoint_every")
"""Settings for the process that holds the parameters: the server, or the workers."""
_CHECKPOINT_VARIABLES = frozenset(f"PS_{name.upper()}" for name in _CHECKPOINT_FLAGS)


class Submission(Struct, frozen=True, kw_only=True):
    """A job for an engine to render.

    Attributes:
        config: The settings of `submit` itself.
        server: The server's settings, except its address.
        worker: The workers' settings, except the server's address and their ranks.
        workers: The number of workers.
        nodes: The number of hosts, each with the same number of workers; None if the engine chooses it.
        script: The script and its arguments; empty for a built-in job.
    """

    config: SubmitConfig
    server: ServerConfig
    worker: WorkerConfig
    workers: int
    nodes: int | None
    script: tuple[str, ...]

    @property
    def name(self) -> str:
        """The job's name in the engine."""
        return self.config.job_name

    @property
    def cpus(self) -> int:
        """Cores per worker in a container."""
        return self.config.cpus or CPUS

    @property
    def memory(self) -> int:
        """GiB per worker in a container. This includes /dev/shm, which counts as memory of its container."""
        return self.config.memory or MEMORY_GIB

    @property
    def per_node(self) -> int:
        """Workers per node; 1 if the engine places each worker separately."""
        return self.workers // self.nodes if self.nodes else 1

    @property
    def all_or_nothing(self) -> bool:
        """Whether the job needs every worker: if one is lost, the job fails and all workers restart."""
        return self.worker.topology == "ring" or self.worker.aggregate or self.server.colocate

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds, or None."""
        if self.config.time is None:
            return None
        days, _, clock = self.config.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def server_words(self) -> list[str]:
        """Flags of `ps-server start`, without --host, --port and --token-file."""
        return _flags(self.server, {"host", "port"})

    @property
    def worker_words(self) -> list[str]:
        """Flags of `ps-worker` without --server and --token-file, then the script and its arguments."""
        return [*_flags(self.worker, {"server"}), *(["--", *self.script] if self.script else [])]

    @property
    def restarts(self) -> int:
        """How often the job restarts after a loss. Without checkpoints it would start at step 0."""
        if self.config.restarts is not None:
            return self.config.restarts
        return RESTARTS if self.servers_folders or self.workers_folders else 0

    @property
    def servers_folders(self) -> tuple[Path, ...]:
        """The checkpoint folder of the hub, if it has one."""
        return () if self.server.checkpoint_dir is None else (self.server.checkpoint_dir,)

    @property
    def workers_folders(self) -> tuple[Path, ...]:
        """The checkpoint folders of the workers, and of the shards on their hosts."""
        own = () if self.worker.checkpoint_dir is None else (self.worker.checkpoint_dir,)
        return tuple(dict.fromkeys(own + (self.servers_folders if self.server.colocate else ())))


def assemble(
    flags: Mapping[str, object],
    script: Sequence[str],
    config_file: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Submission:
    """Makes a job from the command line, PS_* variables and the TOML file.

    Args:
        flags: Values from the command line for all three configs, by field name; None for unset flags.
        script: The script and its arguments.
        config_file: TOML file. The default is the file in PS_CONFIG, if any.
        variables: Variables to use instead of the process's environment.

    Raises:
        ConfigError: A setting is wrong, or two contradict each other.
    """
    variables = environment() if variables is None else variables
    own = {field.name for field in fields(SubmitConfig)}
    config = load(SubmitConfig, {name: flags.get(name) for name in own}, config_file, variables)
    workers, nodes = _layout(config)
    passed = {name: flags[name] for name in flags.keys() - own}
    own_variables = {f"PS_{name.upper()}" for name in own}
    rest = {name: text for name, text in variables.items() if name not in own_variables}
    _check_places(config_file, rest)
    worker, server = _settle(passed, workers, config_file, rest)
    _check_topology(server, worker)
    for word in script:
        _check_text(word)
    return Submission(
        config=config, server=server, worker=worker, workers=workers, nodes=nodes, script=tuple(script)
    )


def _layout(config: SubmitConfig) -> tuple[int, int | None]:
    """Returns the numbers of workers and of nodes. `SubmitConfig` has checked that they match."""
    workers = config.workers or (config.nodes or 1) * config.gpus
    nodes = config.nodes or (workers // config.gpus if config.gpus else None)
    return workers, nodes


def _settle(
    passed: Mapping[str, object], workers: int, config_file: Path | None, variables: Mapping[str, str]
) -> tuple[WorkerConfig, ServerConfig]:
    """Returns the settings of the workers and of the server."""

    def given(config: type[Struct], without: Collection[str]) -> dict[str, object]:
        names = {field.name for field in fields(config)} - {*without}
        return {name: value for name, value in passed.items() if name in names}

    there = {"server": f"hub:{PORT}"}
    others = {name: text for name, text in variables.items() if name not in _CHECKPOINT_VARIABLES}
    worker = load_worker(given(WorkerConfig, _CHECKPOINT_FLAGS) | there, config_file, others)
    saves = worker.topology == "ring" or worker.aggregate
    if saves:
        worker = load_worker(given(WorkerConfig, ()) | there, config_file, variables)
    listens = {"host": "0.0.0.0", "port": PORT, "once": True, "workers": workers}  # noqa: S104
    flags = given(ServerConfig, _CHECKPOINT_FLAGS if saves else ()) | listens
    return worker, load_server(flags, config_file, others if saves else variables)


def _check_places(config_file: Path | None, variables: Mapping[str, str]) -> None:
    for find, names in ((server_origins, _SERVERS_PLACE), (worker_origins, _WORKERS_PLACE)):
        for name, origin in find({}, config_file, variables).items():
            if name in names:
                raise ConfigError(
                    f"{origin}: ps-server submit derives this setting from the engine and the job's size;"
                    " remove it, or use a flag of submit"
                )


def _check_topology(server: ServerConfig, worker: WorkerConfig) -> None:
    if worker.topology == "ring":
        for name, value in changed_settings(server).items():
            if name in _HUBS:
                given = " ".join(flag_words({name: value}))
                raise only_with(given, "--topology hub", "--topology ring")
    for name in ("aggregate", "local"):
        if getattr(worker, name) and server.mode != "bsp":
            raise only_with(flag(name), "--mode bsp", f"--mode {server.mode}")


def _check_text(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError as cause:
        raise ConfigError(
            f"argument {word!a} is not UTF-8, which scripts and manifests require; rename it"
        ) from cause


def _flags(config: Struct, leave_out: Collection[str]) -> list[str]:
    """Returns the flags for all settings that differ from their defaults."""
    changed = changed_settings(config).items()
    return flag_words({name: value for name, value in changed if name not in leave_out})
