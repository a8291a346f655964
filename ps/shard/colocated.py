"""The shard that a worker brings along to a hub that starts none (`--colocate`).

It is a process of its own: as a thread it would wait for the interpreter lock of
a script that computes, and all other workers with it. It must outlive the
worker's own training, and never the worker.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.waiting import TOLD_EVERY
from hubring.ps.process.child import Child
from hubring.ps.transport.host import towards

log = logging.getLogger(__name__)


def outlast(shard: Child, needs: Callable[[], str]) -> None:
    """Returns once no other worker needs this worker's shard, or the shard has ended.

    Args:
        shard: This worker's.
        needs: Waits a little; returns who needs it, empty if nobody does.
    """
    told = -math.inf
    while (whom := needs()) and not shard.ended:
        if time.monotonic() - told > TOLD_EVERY:
            log.info("done here; %s still serves %s", shard, whom)
            told = time.monotonic()


def place(dialled: str, told: str, insecure: bool) -> str:
    """The address on which this host's shard listens: all who reach the server must reach it.

    Args:
        dialled: The server's host, as this worker reached it.
        told: The server's host, as it stands in the server's banner.
        insecure: The server allows shards beyond loopback.

    Raises:
        ConfigError: It would be beyond loopback, and that is not allowed.
    """
    # Who dials a server by loopback shares its host, but other workers may not.
    here = towards(told if is_loopback(dialled) else dialled)
    if not is_loopback(here) and not insecure:
        raise ConfigError(
            f"this worker's shard would listen on {here}, which other machines reach, and the server at"
            f" {dialled} was not told that the network is trusted: start it with --host and --insecure"
        )
    return here
