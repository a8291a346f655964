"""The shard that a worker starts for a server with `--colocate`.

The shard is a separate process. As a thread it would wait for the interpreter lock
of the training script, and all other workers would wait with it. The shard must
outlive the worker's training, but never the worker process.
"""

from __future__ import annotations

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.host import towards


def place(dialled: str, announced: str) -> str:
    """Returns the address on which this worker's shard listens. All clients of the server must reach it.

    Args:
        dialled: The server's host, as this worker connects to it.
        announced: The server's host in the server's banner.

    Raises:
        ConfigError: The address is beyond loopback, and the server is not.
    """
    # A worker that reaches the server by loopback is on the same host, but other workers may not be.
    here = towards(announced if is_loopback(dialled) else dialled)
    if is_loopback(announced) and not is_loopback(here):
        raise ConfigError(
            f"this worker's shard would listen on {here}, which other hosts can reach, but the server at"
            f" {dialled} listens on {announced} only; restart the server with --host and its host's address"
        )
    return here
