"""What a server prints when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.values import is_loopback

PLAIN = "gradients over ZeroMQ are not encrypted (--plain-data): anyone on the path can read them"


def banner(config: ServerConfig, address: str, tokens: Path | None, page: Sequence[str], resumes: str) -> str:
    """Returns the lines that show how to use a server.

    Args:
        config: Its settings.
        address: Its `HOST:PORT`.
        tokens: The file with its tokens; None if it asks for none.
        page: The lines of the status page.
        resumes: The step that it resumes from; empty if it starts from the beginning.
    """
    shards = "one per worker, on its host" if config.colocate else str(config.shards)
    if config.await_shards:
        shards += f", and {config.await_shards} on other hosts"
    constant = {"ssp": f" --staleness {config.staleness}", "backup": f" --backup {config.backup}"}
    mode = config.mode + constant.get(config.mode, "")
    count = f"   # x {config.workers} workers" if config.workers > 1 else ""
    # Clients of this user find only the default file of tokens by themselves.
    here = f" --token-file {config.token_file}" if config.token_file else ""
    elsewhere = " --token-file COPY" if tokens is not None and not is_loopback(config.host) else ""
    worker = f"ps-worker --server {address}{elsewhere or here}"
    lines = [
        f"ps-server on {address}  mode {mode}  shards {shards}",
        *([f"  workers   {worker}{count}"] if config.has_shards else []),
        f"  ring      {worker} --topology ring{'' if config.has_shards else count}",
        f"  status    ps-server status {address}{here}",
        f"  tokens    {_tokens(tokens, config.host)}",
        *([f"  data      {PLAIN}"] if config.sends_plain else []),
        *([f"  saves     {_saves(config)}"] if config.has_shards else []),
        *page,
    ]
    if resumes:
        lines.append(f"  resumes   {resumes}")
    return "\n".join(lines)


def _tokens(file: Path | None, host: str) -> str:
    if file is None:
        return "none, and no encryption (--insecure): every client can change the model"
    if is_loopback(host):
        return f"in {file}; other users of this host need a copy. For workers on other hosts, use --host"
    return f"in {file}; workers on other hosts need a COPY of it"


def _saves(config: ServerConfig) -> str:
    if config.checkpoint_dir is not None:
        return f"every {config.checkpoint_every:g} s to {config.checkpoint_dir}"
    what = "the server" if config.standby else "this server or a shard"
    return f"nothing: without --checkpoint-dir, a hub that loses {what} loses all steps"
