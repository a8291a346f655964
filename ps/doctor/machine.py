"""This machine: cores, memory, shared memory, process limits, and clocks."""

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
from hubring.ps.doctor.finding import GIB, MIB, Finding, failure, format_bytes, ok, warning

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
"""For a shard and one worker of a small job. Each uses about 200 MiB for torch, without parameters."""

ENOUGH_MEMORY = 2 * GIB
"""For a hub and two workers of a medium-sized job."""

LEAST_SHM = 16 * MIB
"""An NCCL segment takes 9.6 MB; a DataLoader's batch of images takes tens of MB."""

ENOUGH_SHM = 1 * GIB
"""NVIDIA recommends this for NCCL in containers. Docker's default is 64 MiB."""

LEAST_FILES = 64
"""Measured without a DataLoader: a shard with two workers has 38 open, a worker 24, a coordinator 20."""

ENOUGH_FILES = 1024
"""Linux's default. A hub's worker needs a few; a batch from a DataLoader process needs one per tensor."""

ADVISED_FILES = 65536

READINGS = 1000
WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)
"""Older than every release of this program: a clock that shows an earlier time is not set."""

_UNLIMITED = resource.RLIM_INFINITY


def allowed_cores() -> float:
    """Returns the CPU time that this process can use, in cores."""
    here = float(len(os.sched_getaffinity(0)))
    return min(here, Cgroup().cores() or here)


def judge_cores(machine: int, here: int, quota: float | None, threads: str | None) -> Finding:
    """Judges whether programs start more threads than can run.

    Args:
        machine: The machine's cores.
        here: The cores in this process's affinity mask. Programs start one thread for each.
        quota: The control group's CPU quota in cores, or None.
        threads: OMP_NUM_THREADS, if it is set.
    """
    found = f"{here} of the machine's {machine} are usable" if here < machine else f"{machine}"
    if quota is None or quota >= here:
        return ok(CORES, found)
    found += f", but the control group's quota is {quota:.3g}"
    if threads is not None:
        return ok(CORES, f"{found}; {OMP_THREADS}={threads} limits the threads")
    least = max(1, int(quota))
    return warning(
        CORES,
        f"{found}: programs start {here} threads, and the kernel throttles all of them",
        f"export {OMP_THREADS}={least} (divided by the workers here), or give the container whole cores"
        f" (docker run --cpuset-cpus 0-{least - 1}, Kubernetes' static CPU manager)",
    )


def examine_cores(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Reads the number of cores and the quota."""
    here = len(os.sched_getaffinity(0))
    yield judge_cores(os.cpu_count() or here, here, Cgroup().cores(), variables.get(OMP_THREADS))


def judge_memory(total: int, available: int, group: cgroup.Memory | None) -> Finding:
    """Judges whether a job fits into memory. All values are in bytes."""
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    fix = "stop other programs (ps aux --sort -rss lists them), or use a machine with more memory"
    if group is not None and group.limit - group.used < available:
        available = max(0, group.limit - group.used)
        found = f"{format_bytes(available)} left of the control group's limit of {format_bytes(group.limit)}"
        fix = "raise the limit: docker run --memory, Compose mem_limit, Kubernetes limits.memory, SLURM --mem"
    if available < LEAST_MEMORY:
        found += f"; a server and a worker need {format_bytes(LEAST_MEMORY)} without a model"
        return failure(MEMORY, found, fix)
    if available < ENOUGH_MEMORY:
        return warning(MEMORY, f"{found}: enough only for a small job", fix)
    return ok(MEMORY, found)


def examine_memory() -> Iterator[Finding]:
    """Reads the machine's memory and the control group's limit."""
    import psutil

    memory = psutil.virtual_memory()
    yield judge_memory(memory.total, memory.available, Cgroup().memory())


def judge_shared(trouble: str) -> Finding:
    """Judges whether workers and shards on the same host can share memory. `trouble` is why not, or empty."""
    if not trouble:
        return ok(SHARED, "workers and shards on this host can share memory (memfd)")
    fix = (
        "use ps-worker --transport zmq; or Linux 5.1 or later and a seccomp profile that allows memfd_create"
    )
    return failure(SHARED, f"cannot create shared memory with memfd: {trouble}", fix)


def judge_shm(total: int, free: int, trouble: str) -> Finding:
    """Judges whether /dev/shm is large enough for DataLoader's processes and NCCL.

    Args:
        total: Size in bytes.
        free: Free space in bytes.
        trouble: Why /dev/shm cannot be written to, or empty.
    """
    users = "DataLoader(num_workers=...) and NCCL need it, the hub does not"
    if trouble:
        return failure(SHM, f"{trouble}; {users}", f"mount -t tmpfs -o size=1g,mode=1777 tmpfs {SHM}")
    found = f"{format_bytes(free)} of {format_bytes(total)} free"
    fix = (
        f"mount -o remount,size=1g {SHM}; in containers: docker run --shm-size 1g, Compose shm_size: 1gb, or"
        f" in Kubernetes an emptyDir of medium Memory at {SHM}"
    )
    if free < LEAST_SHM:
        return failure(SHM, f"{found}: not enough for one batch; {users}", fix)
    if free < ENOUGH_SHM:
        return warning(SHM, f"{found}: can run out, which raises a bus error; {users}", fix)
    return ok(SHM, found)


def examine_shared() -> Iterator[Finding]:
    """Writes a byte to a memfd, which the hub uses, and to /dev/shm, which DataLoader and NCCL use."""
    yield judge_shared(_memfd_trouble())
    trouble = _shm_trouble()
    total, _, free = (0, 0, 0) if trouble else shutil.disk_usage(SHM)
    yield judge_shm(total, free, trouble)


def judge_files(soft: int, hard: int) -> Finding:
    """Judges whether a process can open enough files, sockets and shared memory segments."""
    if soft == _UNLIMITED or soft >= ENOUGH_FILES:
        return ok(FILES, "unlimited" if soft == _UNLIMITED else f"{soft}")
    reach = ADVISED_FILES if hard == _UNLIMITED else min(hard, ADVISED_FILES)
    fix = f"ulimit -n {reach}"
    if reach < ENOUGH_FILES:
        fix = (
            f"raise the hard limit of {hard}: nofile in /etc/security/limits.conf, docker run --ulimit"
            f" nofile={ADVISED_FILES}, LimitNOFILE={ADVISED_FILES} in a systemd unit"
        )
    if soft < LEAST_FILES:
        return failure(FILES, f"at most {soft}; a shard with two workers needs about 40", fix)
    return warning(FILES, f"at most {soft}: enough for a few workers without DataLoader processes", fix)


def judge_memlock(soft: int, gpus: int, rdma: Sequence[str]) -> Finding:
    """Judges whether processes can lock enough memory for GPUs and RDMA network devices."""
    limit = "unlimited" if soft == _UNLIMITED else format_bytes(soft)
    users = [f"{gpus} GPU(s)"] * bool(gpus) + [f"RDMA by {', '.join(rdma)}"] * bool(rdma)
    if soft == _UNLIMITED or not users:
        return ok(MEMLOCK, limit if users else f"{limit}; no GPU and no RDMA device here locks memory")
    return warning(
        MEMLOCK,
        f"{limit}, and {' and '.join(users)} lock buffers in memory: pinning a large model can fail",
        "ulimit -l unlimited; or docker run --ulimit memlock=-1; or LimitMEMLOCK=infinity in a systemd unit",
    )


def examine_limits() -> Iterator[Finding]:
    """Reads the limits (getrlimit(2))."""
    yield judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    rdma = sorted(device.name for device in Path("/sys/class/infiniband").glob("*"))
    yield judge_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], len(gpu.files()), rdma)


def judge_clock(monotonic: Sequence[int], wall: datetime) -> Finding:
    """Judges the clocks.

    Args:
        monotonic: Successive readings in ns of the clock that leases use; they must not decrease.
        wall: The time of day.
    """
    back = max((before - after for before, after in itertools.pairwise(monotonic)), default=0)
    if back > 0:
        folder = "/sys/devices/system/clocksource/clocksource0"
        return failure(
            CLOCK,
            f"the monotonic clock went back by {back} ns: leases would expire at random",
            f"echo NAME > {folder}/current_clocksource, with another NAME from available_clocksource",
        )
    if wall < WRITTEN:
        found = f"the clock shows {wall:%Y-%m-%d %H:%M}, before this program existed: it is not set"
        return warning(CLOCK, found, "timedatectl set-ntp true, or chronyc makestep")
    return ok(CLOCK, f"{wall:%Y-%m-%d %H:%M:%S} UTC; the monotonic clock does not go back")


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
        # judge_shm reports a full /dev/shm from its free space.
        return "" if error.errno == errno.ENOSPC else f"cannot be written: {error.strerror}"
    return ""
