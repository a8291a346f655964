"""The server's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config.address import address, is_loopback
from hubring.ps.config.contradiction import only_with
from hubring.ps.config.declaration import checkpoint, cluster, data_path, debugging
from hubring.ps.config.kinds import Bytes, DeviceName, LogFormat, Port, Seconds, Whole
from hubring.ps.config.settings import flag
from hubring.ps.core.errors import ConfigError


class ServerConfig(Struct, frozen=True, kw_only=True):
    """What `ps-server start` is told.

    Raises:
        ConfigError: Two settings contradict each other; says which and how to mend it.
    """

    host: Annotated[str, cluster("address to listen on; beyond loopback, it needs --insecure")] = "127.0.0.1"
    port: Annotated[Port, cluster("control port; 0 picks a free one")] = 5555
    page_port: Annotated[
        Port | None,
        cluster("port of the status page and /metrics", "the one after --port, or a free one if that is 0"),
    ] = None
    no_page: Annotated[bool, cluster("serve no status page and no /metrics")] = False
    token_file: Annotated[
        Path | None,
        cluster("file with the token for the page's buttons", "a random token, shown in the banner"),
    ] = None
    shards: Annotated[
        Whole, cluster("shard processes on the server's host; 0 if other hosts bring them all")
    ] = 1
    await_shards: Annotated[
        Whole, cluster("shards to wait for from other hosts, which add them with --join")
    ] = 0
    colocate: Annotated[bool, cluster("start no shards; each worker brings one to its host")] = False
    workers: Annotated[
        Whole, cluster("workers the job needs, spares included", "from the workers' launcher, or 1")
    ] = 0
    mode: Annotated[
        Literal["bsp", "asp", "ssp", "backup"],
        data_path("consistency: when gradients are applied and parameters may be read"),
    ] = "bsp"
    staleness: Annotated[Whole, data_path("ssp: steps the fastest worker may lead the slowest")] = 0
    backup: Annotated[Whole, data_path("backup: workers that a round does not wait for")] = 0
    nonfinite: Annotated[
        Literal["refuse", "allow"],
        data_path("NaN or infinite gradients: refuse them and end the job, or apply them"),
    ] = "refuse"
    checkpoint_dir: Annotated[Path | None, checkpoint("folder to save checkpoints to and resume from")] = None
    checkpoint_every: Annotated[Seconds, checkpoint("seconds between checkpoints")] = 60.0
    once: Annotated[bool, cluster("exit when the first job ends")] = False
    join: Annotated[str | None, cluster("add this host's shards to the hub at HOST:PORT")] = None
    on_loss: Annotated[
        Literal["drop", "wait"],
        cluster("after losing a worker: drop it, or wait 1.5 leases for it to return"),
    ] = "drop"
    lease: Annotated[Seconds, cluster("seconds of silence before a worker counts as lost")] = 8.0
    insecure: Annotated[bool, cluster("allow listening beyond loopback without credentials")] = False
    address_file: Annotated[Path | None, cluster("file to write HOST:PORT to once the server listens")] = None
    slice_bytes: Annotated[
        Bytes | None,
        data_path("largest piece of a bucket that travels, in bytes", "from the checkpoint, or tuned"),
    ] = None
    device: Annotated[
        DeviceName, data_path("where this host's shards keep parameters: cpu, cuda or cuda:N")
    ] = "cpu"
    trace: Annotated[Path | None, debugging("folder for a Perfetto trace of this host's shards")] = None
    log_format: Annotated[LogFormat, debugging("format of a log line")] = "text"

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
            raise only_with(f"--staleness {self.staleness}", "--mode ssp", f"--mode {self.mode}")
        if self.backup and self.mode != "backup":
            raise only_with(f"--backup {self.backup}", "--mode backup", f"--mode {self.mode}")
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
