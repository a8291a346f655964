"""`horovodrun`'s flags that change nothing here, and why: scripts that give them need not be edited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import Parameter
from itertools import chain, groupby

import typer

from hubring.ps.config.options import parameter

_WHY = {
    "workers meet at the hub; a ring runs on Gloo anyway, and there is no MPI": (
        *("gloo", "mpi", "mpi_args=", "mpi_threads_disable", "tcp", "binding_args=", "gloo_timeout_seconds="),
    ),
    "operations begin at once, not in cycles": ("cycle_time_ms=", "timeline_mark_cycles"),
    "there are no checks to remember": ("disable_cache", "cache_capacity="),
    "all is on this machine": (
        *("network_interfaces=", "network_interface=", "ssh_port=", "ssh_identity_file="),
        *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
        "blacklist_cooldown_range==",
    ),
    "the exchange tunes itself": ("autotune", "num_nccl_streams=", "thread_affinity="),
    "who waits for long is always told for whom": (
        *("stall_check", "stall_check_warning_time_seconds=", "stall_check_shutdown_time_seconds="),
    ),
    "it is --start-timeout that counts": ("elastic_timeout=",),
    "a worker's log says what happened, and --verbose shows the server's": (
        *("log_level=", "log_with_timestamp", "prefix_output_with_timestamp"),
    ),
}
"""One `=` for each value that a flag takes."""
_TAKES = (bool, str, tuple[int, int])
_SHORT = {"ssh_port": "-p", "ssh_identity_file": "-i"}
IDLE = {name.rstrip("="): why for why, names in _WHY.items() for name in names}
"""By the name of the flag's parameter."""


def options() -> Iterator[Parameter]:
    """The hidden options of `ps-run` for these flags; not given, each is None."""
    for spelt in chain(*_WHY.values()):
        name = spelt.rstrip("=")
        decls = (_SHORT[name], f"--{name.replace('_', '-')}") if name in _SHORT else ()
        yield parameter(name, _TAKES[spelt.count("=")], typer.Option(*decls, hidden=True))


def told(given: Iterable[str]) -> Iterator[str]:
    """A line for each reason, of flags that were given."""
    names = set(given)
    for why, idle in groupby(IDLE, IDLE.__getitem__):
        flags = [f"--{name.replace('_', '-')}" for name in idle if name in names]
        if flags:
            yield f"{', '.join(flags)}: without effect here, as {why}"
