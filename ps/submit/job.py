"""The job that is submitted, as far as it is the same on every engine.

What is the server's and the workers' comes from their own settings, so it is
checked as theirs, and passed on to their own commands. Where the server listens
and which rank a worker has is left to the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config.environment import environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.settings import flag
from hubring.ps.config.sources import load_server, load_submit, load_worker, server_origins, worker_origins
from hubring.ps.config.submit import SubmitConfig
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError

PORT = 5555
"""Where the server listens in a network of the job's own."""
GRACE_SECONDS = 120
"""How long before its end a job is told of it, to save in that time."""

_SERVERS_PLACE = frozenset({"host", "port", "insecure", "once", "join", "address_file", "workers"})
_WORKERS_PLACE = frozenset({"server", "rank", "world_size", "local_rank", "nodes", "gpus", "nr"})
"""What follows from the engine and the job's size: nobody else may say it."""
_HUBS = ("mode", "staleness", "backup", "shards", "colocate", "await_shards", "device", "slice_bytes")
"""What a ring's server would not heed."""
_CHECKPOINT_FLAGS = ("checkpoint_dir", "checkpoint_every")
"""What is for the one who keeps the parameters, by flag or by variable."""
_CHECKPOINT_VARIABLES = frozenset(f"PS_{name.upper()}" for name in _CHECKPOINT_FLAGS)


class Submission(Struct, frozen=True, kw_only=True):
    """What an engine renders.

    Attributes:
        config: What `submit` was told for itself.
        server: The server's settings, but for where it listens.
        worker: The workers' settings, but for their place.
        workers: How many there are.
        nodes: How many hosts share them evenly; None leaves that to the engine.
        script: The script and its arguments, as the user gave them; empty: a job that ships.
    """

    config: SubmitConfig
    server: ServerConfig
    worker: WorkerConfig
    workers: int
    nodes: int | None
    script: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the engine calls it."""
        return self.config.job_name

    @property
    def per_node(self) -> int:
        """Workers on each of `nodes`; 1 where the engine places each by itself."""
        return self.workers // self.nodes if self.nodes else 1

    @property
    def stands_together(self) -> bool:
        """Whether no worker can be done without: the loss of one ends the job, and all start again."""
        return self.worker.topology == "ring" or self.worker.aggregate or self.server.colocate

    @property
    def seconds(self) -> int | None:
        """When it is ended at the latest, in seconds; None: nobody says."""
        if self.config.time is None:
            return None
        days, _, clock = self.config.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def server_words(self) -> list[str]:
        """Flags of `ps-server start`, but for where it listens."""
        return _spelt(self.server, {"host", "port"})

    @property
    def worker_words(self) -> list[str]:
        """Flags of `ps-worker` but for its server, then the script and its arguments."""
        return [*_spelt(self.worker, {"server"}), *(["--", *self.script] if self.script else [])]

    @property
    def servers_folder(self) -> Path | None:
        """Where the hub keeps checkpoints."""
        return self.server.checkpoint_dir

    @property
    def workers_folders(self) -> tuple[Path, ...]:
        """Where workers, or the shards beside them, do."""
        beside = self.server.checkpoint_dir if self.server.colocate else None
        return tuple(dict.fromkeys(path for path in (self.worker.checkpoint_dir, beside) if path))


def assemble(
    flags: Mapping[str, object],
    script: Sequence[str],
    config_file: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Submission:
    """Makes the job of what the command line, PS_* and the TOML file say.

    Args:
        flags: Field name of any of the three configs to what the command line gave; None: nothing.
        script: The script and its arguments.
        config_file: TOML file; None: the one that PS_CONFIG names, if any.
        variables: Instead of the process's own.

    Raises:
        ConfigError: A setting is wrong, or two contradict each other.
    """
    variables = environment() if variables is None else variables
    own = {field.name for field in fields(SubmitConfig)}
    config = load_submit({name: flags.get(name) for name in own}, config_file, variables)
    workers, nodes = _layout(config)
    passed = {name: flags[name] for name in flags.keys() - own}
    rest = {
        name: text for name, text in variables.items() if name not in {f"PS_{one.upper()}" for one in own}
    }
    _check_places(config_file, rest)
    worker, server = _settle(passed, workers, config_file, rest)
    _check_topology(server, worker)
    for word in script:
        _check_text(word)
    return Submission(
        config=config, server=server, worker=worker, workers=workers, nodes=nodes, script=tuple(script)
    )


def _layout(config: SubmitConfig) -> tuple[int, int | None]:
    """How many workers, and on how many nodes; `SubmitConfig` has made sure that the two fit."""
    workers = config.workers or (config.nodes or 1) * config.gpus
    nodes = config.nodes or (workers // config.gpus if config.gpus else None)
    return workers, nodes


def _settle(
    passed: Mapping[str, object], workers: int, config_file: Path | None, variables: Mapping[str, str]
) -> tuple[WorkerConfig, ServerConfig]:
    """The settings of both."""
    servers = {field.name for field in fields(ServerConfig)} & passed.keys()
    workers_ = {field.name for field in fields(WorkerConfig)} & passed.keys()
    checkpoints = set(_CHECKPOINT_FLAGS) & passed.keys()
    told = {name: passed[name] for name in workers_ - checkpoints} | {"server": f"hub:{PORT}"}
    others = {name: text for name, text in variables.items() if name not in _CHECKPOINT_VARIABLES}
    worker = load_worker(told, config_file, others)
    servers_variables = variables
    if worker.topology == "ring" or worker.aggregate:
        worker = load_worker({**told, **{name: passed[name] for name in checkpoints}}, config_file, variables)
        servers -= checkpoints
        servers_variables = others
    listens = {"host": "0.0.0.0", "insecure": True, "once": True, "workers": workers}  # noqa: S104
    server = load_server(
        {**{name: passed[name] for name in servers}, **listens}, config_file, servers_variables
    )
    return worker, server


def _check_places(config_file: Path | None, variables: Mapping[str, str]) -> None:
    for find, names in ((server_origins, _SERVERS_PLACE), (worker_origins, _WORKERS_PLACE)):
        for name, said in find({}, config_file, variables).items():
            if name in names:
                raise ConfigError(
                    f"{said}: under ps-server submit that follows from the engine and the job's size;"
                    " leave it out, or say it by a flag of submit"
                )


def _check_topology(server: ServerConfig, worker: WorkerConfig) -> None:
    if worker.topology == "ring":
        for field in fields(server):
            value = getattr(server, field.name)
            if field.name in _HUBS and value != field.default:
                given = flag(field.name) if value is True else f"{flag(field.name)} {value}"
                raise ConfigError(
                    f"{given} means something only with --topology hub, but there is --topology ring:"
                    " drop one"
                )
    if worker.aggregate and server.mode != "bsp":
        raise ConfigError(
            f"--aggregate needs a synchronous hub, but there is --mode {server.mode}: drop one of the two"
        )


def _check_text(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError as cause:
        raise ConfigError(
            f"argument {word!a} is no UTF-8, and scripts and manifests hold nothing else: rename it"
        ) from cause


def _spelt(config: Struct, leave_out: Collection[str]) -> list[str]:
    """The flags that say what differs from the defaults."""
    words = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in leave_out and value != field.default:
            words += [flag(field.name)] if value is True else [flag(field.name), str(value)]
    return words
