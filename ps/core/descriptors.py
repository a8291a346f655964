"""How many file descriptors a process may have open, and which part of them connections may take.

Law: strangers take descriptors too, so every kind of connection has a limit below that of the process. The
rest is left for files, shared memory and the connections of members.
"""

from __future__ import annotations

import errno
import resource

ENOUGH = 65_536
"""No process needs more: a shard of 1,024 workers has about 4,000 open."""

PAUSE_SECONDS = 0.1
"""How long a listener accepts no connection after the system had no descriptor for one."""

_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> None:
    """Raises this process's soft limit as far as its hard limit allows, up to ENOUGH."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Returns the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def share(wanted: int, parts: int) -> int:
    """Returns how many connections one kind may have: `wanted`, or one of `parts` of all descriptors."""
    return max(1, min(wanted, limit() // parts))


def out_of_them(error: OSError) -> bool:
    """Whether the system had no descriptor, or no memory for one, rather than the peer being at fault."""
    return error.errno in _OUT_OF
