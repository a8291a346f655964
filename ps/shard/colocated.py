"""The shard that a worker starts for a server with `--colocate`.

The shard is a separate process. As a thread it would wait for the interpreter lock
of the training script, and all other workers would wait with it. The shard must
outlive the worker's training, but never the worker process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.waiting import LOG_EVERY
from hubring.ps.process.child import Child
from hubring.ps.transport.host import towards

log = logging.getLogger(__name__)


def outlast(shard: Child, needs: Callable[[], str]) -> None:
    """Returns once no other worker needs this worker's shard, or the shard has exited.

    Args:
        shard: This worker's shard.
        needs: Waits a short time; returns which workers need the shard, empty if none do.
    """
    logged = -math.inf
    while (workers := needs()) and not shard.ended:
        if time.monotonic() - logged > LOG_EVERY:
            log.info("training has finished; %s still serves %s", shard, workers)
            logged = time.monotonic()


def place(dialled: str, announced: str, insecure: bool) -> str:
    """Returns the address on which this worker's shard listens. All clients of the server must reach it.

    Args:
        dialled: The server's host, as this worker connects to it.
        announced: The server's host in the server's banner.
        insecure: Whether the server allows shards beyond loopback.

    Raises:
        ConfigError: The address is beyond loopback, and the server does not allow that.
    """
    # A worker that reaches the server by loopback is on the same host, but other workers may not be.
    here = towards(announced if is_loopback(dialled) else dialled)
    if not is_loopback(here) and not insecure:
        raise ConfigError(
            f"this worker's shard would listen on {here}, which other hosts can reach, but the server at"
            f" {dialled} runs without --insecure; if the network is trusted, restart the server with --host"
            " and --insecure"
        )
    return here
