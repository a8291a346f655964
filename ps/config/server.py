"""The server's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import fields

from hubring.ps.config.address import address, is_loopback
from hubring.ps.config.contradiction import only_with
from hubring.ps.config.kinds import Bytes, DeviceName, LogFormat, Port, Seconds, Whole
from hubring.ps.config.settings import flag
from hubring.ps.core.errors import ConfigError


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
    """When a gradient is applied and parameters may be read: see `hubring.ps.store.consistency`."""
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
