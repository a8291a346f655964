"""The server's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct

from hubring.ps.config.declaration import (
    AuthorityFile,
    CertificateFile,
    KeyFile,
    TlsFiles,
    changed_settings,
    checkpoint,
    cluster,
    data_path,
    debugging,
    flag,
    only_with,
)
from hubring.ps.config.values import (
    LAST_PORT,
    Bytes,
    DeviceName,
    LogFormat,
    Port,
    Seconds,
    Whole,
    address,
    is_loopback,
)
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import MAX_WORLD_SIZE


class ServerConfig(Struct, frozen=True, kw_only=True):
    """The settings of `ps-server start`.

    Raises:
        ConfigError: Two settings contradict each other. The message names both and suggests a fix.
    """

    host: Annotated[str, cluster("address to listen on; beyond loopback with encrypted data")] = "127.0.0.1"
    port: Annotated[Port, cluster("control port; 0 picks a free one")] = 5555
    page_port: Annotated[
        Port | None,
        cluster("port of the status page and /metrics", "--port plus 1, or a free port if --port is 0"),
    ] = None
    page_public: Annotated[bool, cluster("let anybody read the status page without its token")] = False
    no_page: Annotated[bool, cluster("serve no status page and no /metrics")] = False
    page_token_file: Annotated[
        Path | None,
        cluster(
            "file with the token for the page and its buttons",
            "a random token; the banner shows it or names its file",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        cluster(
            "file with the tokens that let workers, shards and people in; made if it does not exist",
            "a file in the user's runtime directory",
        ),
    ] = None
    tls_cert: CertificateFile = None
    tls_key: KeyFile = None
    tls_ca: AuthorityFile = None
    shards: Annotated[
        Whole, cluster("shard processes on the server's host; 0 for a ring, or if other hosts add all shards")
    ] = 1
    await_shards: Annotated[
        Whole, cluster("shards to wait for from other hosts, which add them with --join")
    ] = 0
    standby: Annotated[
        Whole,
        cluster(
            "standbys of each shard and of the coordinator, so that no crash of one process loses a step:"
            " 0 or 1"
        ),
    ] = 0
    colocate: Annotated[bool, cluster("start no shards; each worker starts one on its own host")] = False
    workers: Annotated[
        Whole, cluster("number of workers, including those of --backup", "from the workers' launcher, or 1")
    ] = 0
    mode: Annotated[
        Literal["bsp", "asp", "ssp", "backup"],
        data_path("consistency: when gradients are applied and parameters can be read"),
    ] = "bsp"
    staleness: Annotated[
        Whole, data_path("ssp: steps that the fastest worker can be ahead of the slowest")
    ] = 0
    backup: Annotated[Whole, data_path("backup: workers that a round does not wait for")] = 0
    nonfinite: Annotated[
        Literal["refuse", "allow"],
        data_path("NaN or infinite gradients: refuse them and end the job, or apply them"),
    ] = "refuse"
    checkpoint_dir: Annotated[Path | None, checkpoint("folder to save checkpoints to and resume from")] = None
    checkpoint_every: Annotated[Seconds, checkpoint("seconds between checkpoints")] = 60.0
    once: Annotated[bool, cluster("exit when the first job ends")] = False
    restarts: Annotated[
        Whole, cluster("restarts after a loss (exit codes 69 and 75, or a signal that kills)")
    ] = 0
    join: Annotated[str | None, cluster("add this host's shards to the hub at HOST:PORT")] = None
    on_loss: Annotated[
        Literal["drop", "wait"],
        cluster("when a worker is lost: drop it, or wait 1.5 leases for it to return"),
    ] = "drop"
    # Long, because a busy or suspended machine is no loss: a process that ends closes its connection.
    lease: Annotated[
        Seconds, cluster("seconds without a heartbeat before a connected worker or shard is lost")
    ] = 90.0
    insecure: Annotated[
        bool, cluster("ask for no tokens and encrypt nothing: every client can change the model")
    ] = False
    plain_data: Annotated[
        bool,
        cluster("beyond loopback, send gradients over ZeroMQ without encryption, but authenticated"),
    ] = False
    address_file: Annotated[Path | None, cluster("file to write HOST:PORT to once the server listens")] = None
    slice_bytes: Annotated[
        Bytes | None,
        data_path("largest slice of a bucket, in bytes", "from the checkpoint, or tuned"),
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
        self.tls.check(insecure=self.insecure)
        if self.insecure and self.token_file is not None:
            raise ConfigError(
                f"--token-file {self.token_file} lets in clients with a token, but --insecure lets in all;"
                " remove one of the two"
            )
        if self.standby > 1:
            raise ConfigError(f"--standby {self.standby} is too many; use --standby 1, or 0 for no standbys")
        if self.join is not None:
            self._check_join(self.join)

    @property
    def has_shards(self) -> bool:
        """Whether shards take part in its jobs; otherwise it only serves rings."""
        return bool(self.shards or self.await_shards or self.colocate)

    @property
    def tls(self) -> TlsFiles:
        """The server's own certificate."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def sends_plain(self) -> bool:
        """Whether gradients leave this host without encryption, but authenticated."""
        return self.plain_data and not self.insecure and not is_loopback(self.host)

    @property
    def silent_seconds(self) -> float:
        """How long the coordinator may refuse connections before workers and shards give it up."""
        return 20.0 if self.standby else 4.0

    @property
    def patience(self) -> float:
        """How long the coordinator may not answer before workers and shards give it up."""
        return max(self.lease, self.silent_seconds)

    @property
    def members(self) -> int:
        """How many processes connect. The next job's workers can do so before a job has ended."""
        workers = 2 * self.workers * (1 + self.colocate) or MAX_WORLD_SIZE
        return workers + (1 + self.standby) * (self.shards + self.await_shards)

    @property
    def status_port(self) -> int | None:
        """The status page's port: the one after the control port unless it is set, 0 for a free one."""
        if self.no_page:
            return None
        return self.page_port if self.page_port is not None else self.port and self.port + 1

    def _check_mode(self) -> None:
        if self.staleness and self.mode != "ssp":
            raise only_with(f"--staleness {self.staleness}", "--mode ssp", f"--mode {self.mode}")
        if self.backup and self.mode != "backup":
            raise only_with(f"--backup {self.backup}", "--mode backup", f"--mode {self.mode}")
        if self.mode == "backup" and not self.backup:
            raise ConfigError("--mode backup needs --backup B, the workers that a round does not wait for")
        if self.workers > MAX_WORLD_SIZE:
            raise ConfigError(
                f"--workers {self.workers} is too large; use at most --workers {MAX_WORLD_SIZE}"
            )
        if self.workers and self.backup >= self.workers:
            raise ConfigError(
                f"--backup {self.backup} with --workers {self.workers} leaves no worker to wait for;"
                f" use at most --backup {self.workers - 1}"
            )

    def _check_page(self) -> None:
        for name in ("page_port", "page_token_file"):
            given = getattr(self, name)
            if self.no_page and given is not None:
                raise ConfigError(
                    f"{flag(name)} {given} configures the status page, but --no-page disables it; remove one"
                    " of the two"
                )
        if self.port and self.page_port == self.port:
            raise ConfigError(
                f"--page-port {self.page_port} is also the control port; use another port, or remove"
                " --page-port to use the next one"
            )
        if self.status_port == LAST_PORT + 1:
            raise ConfigError(
                f"--port {self.port} is the last port, so there is no next one for the status page;"
                " set --page-port too (0 for a free port), or use --no-page"
            )

    def _check_shards(self) -> None:
        for name, (does, instead) in _NOT_COLOCATED.items() if self.colocate and self.join is None else ():
            if name in changed_settings(self):
                raise ConfigError(
                    f"{flag(name)} {getattr(self, name)} {does}, but with --colocate {instead};"
                    " remove one of the two"
                )
        if self.standby and self.device != "cpu":
            raise ConfigError(
                f"--standby {self.standby} does not support shards on --device {self.device};"
                " remove one of the two"
            )
        if self.shards == 0 and self.join is not None:
            raise ConfigError(
                f"--shards 0 adds no shards to the hub at {self.join}; use --shards 1 or more, or remove"
                " --join"
            )

    def _check_join(self, coordinator: str) -> None:
        there, _ = address(coordinator)
        for name in changed_settings(self):
            if name not in _SHARD_HOST:
                raise ConfigError(
                    f"{flag(name)} is a setting of the coordinator, but --join only adds shards to the"
                    f" one at {coordinator}; set it there, or remove --join"
                )
        if is_loopback(self.host) and not is_loopback(there):
            raise ConfigError(
                f"shards on --host {self.host} cannot be reached from {coordinator}; set --host to this"
                " machine's address"
            )


_NOT_COLOCATED = {
    "device": ("applies to shards on this host", "each worker starts a shard on its own host, on the CPU"),
    "shards": ("starts shards on this host", "each worker starts one on its own host"),
    "await_shards": ("waits for shards on other hosts", "the workers start all shards"),
    "standby": ("keeps a copy of each shard on another host", "a lost worker ends the job"),
}
"""Settings that contradict `--colocate`: what each does, and what happens instead."""

_SHARD_HOST = {
    *("join", "host", "shards", "standby", "device", "trace", "log_format"),
    *("insecure", "plain_data", "token_file", "restarts"),
    *("tls_cert", "tls_key", "tls_ca"),
}
"""The settings of a host that only adds shards; all others are settings of the coordinator."""
