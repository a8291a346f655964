"""`horovodrun`'s flags that `ps-run` accepts but ignores, and why, so that scripts run without edits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import Parameter
from itertools import chain, groupby

import typer

from hubring.ps.config.options import parameter

_WHY = {
    "workers meet at the server, a ring always runs on Gloo or NCCL, and there is no MPI": (
        *("gloo", "mpi", "mpi_args=", "mpi_threads_disable", "tcp", "binding_args=", "gloo_timeout_seconds="),
    ),
    "operations start immediately, not in cycles": ("cycle_time_ms=", "timeline_mark_cycles"),
    "there is no response cache": ("disable_cache", "cache_capacity="),
    "ps-run uses only this machine": (
        *("network_interfaces=", "network_interface=", "ssh_port=", "ssh_identity_file="),
        *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
        "blacklist_cooldown_range==",
    ),
    "the exchange tunes itself": ("autotune", "num_nccl_streams=", "thread_affinity="),
    "waiting workers always log who is missing": (
        *("stall_check", "stall_check_warning_time_seconds=", "stall_check_shutdown_time_seconds="),
    ),
    "--start-timeout applies instead": ("elastic_timeout=",),
    "PS_LOG_FORMAT sets the log format, and --verbose shows the server's log": (
        *("log_level=", "log_with_timestamp", "prefix_output_with_timestamp"),
    ),
}
"""Reason to flags. Each trailing `=` is one value that the flag takes."""
_TAKES = (bool, str, tuple[int, int])
_SHORT = {"ssh_port": "-p", "ssh_identity_file": "-i"}
IDLE = {name.rstrip("="): why for why, names in _WHY.items() for name in names}
"""Name of a flag's parameter to the reason."""


def options() -> Iterator[Parameter]:
    """Yields a hidden option of `ps-run` for each of these flags; the default is None."""
    for spelt in chain(*_WHY.values()):
        name = spelt.rstrip("=")
        decls = (_SHORT[name], f"--{name.replace('_', '-')}") if name in _SHORT else ()
        yield parameter(name, _TAKES[spelt.count("=")], typer.Option(*decls, hidden=True))


def notices(given: Iterable[str]) -> Iterator[str]:
    """Yields one line for each reason, which names the given flags."""
    names = set(given)
    for why, idle in groupby(IDLE, IDLE.__getitem__):
        flags = [f"--{name.replace('_', '-')}" for name in idle if name in names]
        if flags:
            yield f"{', '.join(flags)}: no effect, since {why}"
