"""Limits of a process (getrlimit(2)): open files, and memory that it may lock."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from hubring.ps.doctor import cuda
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.sizes import spelt

FILES = "open files"
MEMLOCK = "memlock"

LEAST_FILES = 64
"""A shard with two workers had 38 open, a worker 24 and a coordinator 20, without a DataLoader."""

ENOUGH_FILES = 1024
"""Linux's own choice; each worker of a hub takes a few, each batch of a DataLoader's process one a tensor."""

ADVISED_FILES = 65536

_UNLIMITED = resource.RLIM_INFINITY


def judge_files(soft: int, hard: int) -> Finding:
    """Whether a process may open as many files, sockets and segments of memory as jobs take."""
    if soft == _UNLIMITED or soft >= ENOUGH_FILES:
        return ok(FILES, "unlimited" if soft == _UNLIMITED else f"{soft}")
    reach = ADVISED_FILES if hard == _UNLIMITED else min(hard, ADVISED_FILES)
    mend = f"ulimit -n {reach}"
    if reach < ENOUGH_FILES:
        mend = (
            f"raise the hard limit of {hard}: nofile in /etc/security/limits.conf, docker run --ulimit"
            f" nofile={ADVISED_FILES}, LimitNOFILE={ADVISED_FILES} in a systemd unit"
        )
    if soft < LEAST_FILES:
        return failure(FILES, f"{soft} at most, and a shard with two workers takes about 40", mend)
    return warning(FILES, f"{soft} at most: enough for a few workers, without DataLoader processes", mend)


def judge_memlock(soft: int, gpus: int, rdma: Sequence[str]) -> Finding:
    """Whether what must stay in main memory may.

    Args:
        soft: Bytes.
        gpus: That this machine has; buffers from which they are copied are pinned.
        rdma: Network devices that read and write main memory by themselves.
    """
    limit = "unlimited" if soft == _UNLIMITED else spelt(soft)
    users = [f"{gpus} GPU(s)"] * bool(gpus) + [f"RDMA by {', '.join(rdma)}"] * bool(rdma)
    if soft == _UNLIMITED or not users:
        return ok(MEMLOCK, limit if users else f"{limit}; nothing here locks memory, without GPU and RDMA")
    return warning(
        MEMLOCK,
        f"{limit}, and {' and '.join(users)} lock buffers in memory: pinning a large model may fail",
        "ulimit -l unlimited; docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in a systemd unit",
    )


def examine() -> Iterator[Finding]:
    """Asks the kernel."""
    yield judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    folder = Path("/sys/class/infiniband")
    rdma = sorted(device.name for device in folder.iterdir()) if folder.is_dir() else []
    yield judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], len(cuda.files()), rdma)
