"""The settings that a job on this machine passes on to its server and to its workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hubring.ps.checkpoint.checkpoint_folder import OF_WORKERS
from hubring.ps.config.declaration import flag
from hubring.ps.config.sources import load_server, load_worker, refuse_unknown
from hubring.ps.core.errors import ConfigError
from hubring.ps.security.access import check_token_file
from hubring.ps.security.guard import Role
from hubring.workers.runtime.metric_export import require_writer

SERVER = (
    *("shards", "mode", "staleness", "backup", "nonfinite", "on_loss", "lease", "slice_bytes", "device"),
    *("page_port", "checkpoint_dir", "checkpoint_every"),
)
WORKER = (
    *("topology", "backend", "accelerator", "transport", "aggregate", "compress", "bucket_bytes", "timeout"),
    *("report_to", "as_gloo", "local"),
)
DEFAULTS = {"on_loss": "wait; elastic: drop", "page_port": "a free port"}
"""Where they differ from the server's own, in words."""
_OF_BOTH = ("checkpoint_dir", "checkpoint_every")
"""They go to the process that holds the optimizer's state: the server, or the workers."""
_NO_ADDRESS = "127.0.0.1:1"


class LocalJobSettings(NamedTuple):
    """Settings by field name, checked.

    Attributes:
        server: For `ps-server start`.
        worker: For each worker.
        mode: The consistency mode; empty with `--as-gloo`, where the hub steps nothing.
        topology: `hub` or `ring`.
        checkpoints: The folder of the job's checkpoints, or None.
    """

    server: dict[str, Any]
    worker: dict[str, Any]
    mode: str
    topology: str
    checkpoints: Path | None

    @property
    def worker_variables(self) -> dict[str, str]:
        """The settings of a worker as environment variables."""
        return {f"PS_{name.upper()}": str(value) for name, value in self.worker.items()}


def settle(given: Mapping[str, Any], size: int, variables: Mapping[str, str]) -> LocalJobSettings:
    """Sorts settings into those of the server and those of the workers, and checks all.

    Args:
        given: Field name to value; None if it is not set.
        size: Number of workers.
        variables: The environment of server and workers.

    Raises:
        ConfigError: A setting or a variable is unknown or invalid, or they contradict each other; or the file
            with the tokens cannot be used.
    """
    for name in given:
        refuse_unknown(f"{name}={given[name]!r}", name, {*SERVER, *WORKER})
    worker = _chosen(given, WORKER)
    config = load_worker({**worker, "server": _NO_ADDRESS}, environment=variables)
    require_writer(config.report_to)
    server = _chosen(given, SERVER)
    workers_save = config.topology == "ring" or config.aggregate
    # Also on a hub, which leaves this to the workers where it can only average.
    worker |= {name: server[name] for name in _OF_BOTH if name in server}
    if workers_save:
        server = {name: value for name, value in server.items() if name not in _OF_BOTH}
    if config.topology == "ring":
        for name in ("mode", "staleness", "backup", "shards"):
            if server.get(name, 0) not in (0, "bsp"):
                raise ConfigError(
                    f"{flag(name)} {server[name]} is for a hub, but the job has --topology ring;"
                    " remove one of the two"
                )
    hub = load_server({**server, "workers": size, "port": 0}, environment=variables)
    if config.topology == "ring":
        if hub.colocate:
            raise ConfigError(
                "PS_COLOCATE=1 is for a hub, but the job has --topology ring; remove one of the two"
            )
        server["shards"] = 0
    if hub.standby:
        raise ConfigError(
            f"PS_STANDBY={hub.standby} is for a server that you start; ps-run starts its own, and restarts it"
            " from the last checkpoint. Unset PS_STANDBY, or use ps-server start --standby 1 and ps-worker"
        )
    for file in (hub.token_file, config.token_file):
        check_token_file(file, Role.WORKER)
    checkpoints = hub.checkpoint_dir
    if workers_save:
        folder = worker.get("checkpoint_dir", config.checkpoint_dir)
        checkpoints = Path(folder) / OF_WORKERS if folder is not None else None
    return LocalJobSettings(server, worker, "" if config.as_gloo else hub.mode, config.topology, checkpoints)


def _chosen(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if given.get(name) is not None}
