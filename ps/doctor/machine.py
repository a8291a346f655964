"""This machine: its cores, memory, shared memory, limits of processes, and clocks."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hubring.ps.doctor import cgroup, gpu
from hubring.ps.doctor.cgroup import Cgroup
from hubring.ps.doctor.finding import GIB, MIB, Finding, failure, ok, spelt, warning

CORES, MEMORY, SHARED, FILES, MEMLOCK, CLOCK = (
    "cores",
    "memory",
    "shared memory",
    "open files",
    "memlock",
    "clock",
)
SHM = "/dev/shm"  # noqa: S108 - examined, not used
OMP_THREADS = "OMP_NUM_THREADS"

LEAST_MEMORY = 512 * MIB
"""A shard and one worker of a small job: each uses some 200 MiB for torch before it has a parameter."""

ENOUGH_MEMORY = 2 * GIB
"""For a hub and two workers of a job that is no toy."""

LEAST_SHM = 16 * MIB
"""NCCL's pieces have 9.6 MB each, and a DataLoader's batch of images has tens."""

ENOUGH_SHM = 1 * GIB
"""NVIDIA's advice for containers with NCCL; Docker gives 64 MiB by default."""

LEAST_FILES = 64
"""A shard with two workers had 38 open, a worker 24 and a coordinator 20, without a DataLoader."""

ENOUGH_FILES = 1024
"""Linux's default; each worker of a hub takes a few, each batch of a DataLoader's process one a tensor."""

ADVISED_FILES = 65536

READINGS = 1000
WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)
"""All of this is younger: a clock that shows an earlier time was never set."""

_UNLIMITED = resource.RLIM_INFINITY


def allowed_cores() -> float:
    """How many cores' time this process may use."""
    here = float(len(os.sched_getaffinity(0)))
    return min(here, Cgroup().cores() or here)


def judge_cores(machine: int, here: int, quota: float | None, threads: str | None) -> Finding:
    """Whether programs start only as many threads as can run.

    Programs count the cores `here`, on which they may run; `quota` is the time that their control group may
    use. `threads` is OMP_NUM_THREADS, if it is set.
    """
    found = f"{here} of the machine's {machine} may be used" if here < machine else f"{machine}"
    if quota is None or quota >= here:
        return ok(CORES, found)
    found += f", but the control group may use the time of {quota:.3g} only"
    if threads is not None:
        return ok(CORES, f"{found}; {OMP_THREADS}={threads} says how many threads start")
    least = max(1, int(quota))
    return warning(
        CORES,
        f"{found}: programs start {here} threads, which are then held up together",
        f"export {OMP_THREADS}={least} (divided by the workers here), or give the container whole cores:"
        f" docker run --cpuset-cpus 0-{least - 1}, Kubernetes' static CPU manager",
    )


def examine_cores(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Counts cores."""
    here = len(os.sched_getaffinity(0))
    yield judge_cores(os.cpu_count() or here, here, Cgroup().cores(), variables.get(OMP_THREADS))


def judge_memory(total: int, available: int, group: cgroup.Memory | None) -> Finding:
    """Whether a job fits; all in bytes."""
    found = f"{spelt(available)} of {spelt(total)} available"
    mend = "stop what else runs here (ps aux --sort -rss), or take a machine with more"
    if group is not None and group.limit - group.used < available:
        available = max(0, group.limit - group.used)
        found = f"{spelt(available)} left of the {spelt(group.limit)} that the control group may have"
        mend = (
            "raise the limit: docker run --memory, Compose mem_limit, Kubernetes limits.memory, SLURM --mem"
        )
    if available < LEAST_MEMORY:
        found += f"; a server and a worker take {spelt(LEAST_MEMORY)} before any model"
        return failure(MEMORY, found, mend)
    if available < ENOUGH_MEMORY:
        return warning(MEMORY, f"{found}: enough for a small job alone", mend)
    return ok(MEMORY, found)


def examine_memory() -> Iterator[Finding]:
    """Asks the kernel and the control group."""
    import psutil

    memory = psutil.virtual_memory()
    yield judge_memory(memory.total, memory.available, Cgroup().memory())


def judge_shared(trouble: str) -> Finding:
    """Whether workers and shards of one host can share memory; `trouble` says why not."""
    if not trouble:
        return ok(SHARED, "workers and shards of this host can share memory (memfd)")
    mend = "ps-worker --transport zmq; or Linux from 5.1 on, and no seccomp profile against memfd_create"
    return failure(SHARED, f"memory without a name (memfd) cannot be had: {trouble}", mend)


def judge_shm(total: int, free: int, trouble: str) -> Finding:
    """Whether DataLoader's processes and NCCL have room; `trouble` says why nothing can be written there."""
    users = "DataLoader(num_workers=...) and NCCL need it, the hub does not"
    if trouble:
        return failure(SHM, f"{trouble}; {users}", f"mount -t tmpfs -o size=1g,mode=1777 tmpfs {SHM}")
    found = f"{spelt(free)} of {spelt(total)} free"
    mend = (
        f"mount -o remount,size=1g {SHM}; docker run --shm-size 1g, Compose shm_size: 1gb, Kubernetes an"
        f" emptyDir of medium Memory at {SHM}"
    )
    if free < LEAST_SHM:
        return failure(SHM, f"{found}: not enough for one batch; {users}", mend)
    if free < ENOUGH_SHM:
        return warning(SHM, f"{found}: may run out (a bus error); {users}", mend)
    return ok(SHM, found)


def examine_shared() -> Iterator[Finding]:
    """Writes a byte to the hub's kind of shared memory, which has no name, and to /dev/shm, others' kind."""
    yield judge_shared(_memfd_trouble())
    trouble = _shm_trouble()
    total, _, free = (0, 0, 0) if trouble else shutil.disk_usage(SHM)
    yield judge_shm(total, free, trouble)


def judge_files(soft: int, hard: int) -> Finding:
    """Whether a process may open as many files, sockets and segments of memory as jobs need."""
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
    """Whether buffers may be locked in main memory, for GPUs and for network devices with RDMA."""
    limit = "unlimited" if soft == _UNLIMITED else spelt(soft)
    users = [f"{gpus} GPU(s)"] * bool(gpus) + [f"RDMA by {', '.join(rdma)}"] * bool(rdma)
    if soft == _UNLIMITED or not users:
        return ok(MEMLOCK, limit if users else f"{limit}; nothing here locks memory, without GPU and RDMA")
    return warning(
        MEMLOCK,
        f"{limit}, and {' and '.join(users)} lock buffers in memory: pinning a large model may fail",
        "ulimit -l unlimited; docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in a systemd unit",
    )


def examine_limits() -> Iterator[Finding]:
    """Asks the kernel (getrlimit(2))."""
    yield judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    rdma = sorted(device.name for device in Path("/sys/class/infiniband").glob("*"))
    yield judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], len(gpu.files()), rdma)


def judge_clock(monotonic: Sequence[int], wall: datetime) -> Finding:
    """Whether readings of the clock that leases run on never go back, in ns, and the time of day is set."""
    back = max((before - after for before, after in itertools.pairwise(monotonic)), default=0)
    if back > 0:
        folder = "/sys/devices/system/clocksource/clocksource0"
        return failure(
            CLOCK,
            f"the monotonic clock went back by {back} ns: leases would end at random",
            f"echo NAME > {folder}/current_clocksource, with another of those in available_clocksource",
        )
    if wall < WRITTEN:
        found = f"it shows {wall:%Y-%m-%d %H:%M}, when this program was not written yet"
        return warning(CLOCK, found, "timedatectl set-ntp true, or chronyc makestep")
    return ok(CLOCK, f"{wall:%Y-%m-%d %H:%M:%S} UTC; the monotonic one goes forward")


def examine_clock() -> Iterator[Finding]:
    """Reads both clocks."""
    yield judge_clock([time.monotonic_ns() for _ in range(READINGS)], datetime.now(UTC))


def _memfd_trouble() -> str:
    from hubring.ps.transport.shm.segment import Arena

    try:
        Arena(guarded=True).allocate(1)[0] = 1
    except OSError as error:
        return str(error)
    return ""


def _shm_trouble() -> str:
    if not Path(SHM).is_dir():
        return f"there is no {SHM}"
    try:
        with tempfile.TemporaryFile(dir=SHM) as file:
            file.write(b"1")
    except OSError as error:
        # If it is full, its size says so.
        return "" if error.errno == errno.ENOSPC else f"cannot be written: {error.strerror}"
    return ""
