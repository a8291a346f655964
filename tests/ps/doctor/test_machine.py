"""Cores, memory, limits and clocks: what the doctor says of them."""

from __future__ import annotations

from datetime import UTC, datetime

from hubring.ps.doctor import machine
from hubring.ps.doctor.cgroup import Memory
from hubring.ps.doctor.finding import GIB, MIB
from tests.ps.doctor.case import Case, judgements

CASES = [
    Case(machine.judge_cores(16, 16, None, None), "ok", "16"),
    Case(machine.judge_cores(16, 4, 8.0, None), "ok", "4 of the machine's 16 are usable"),
    Case(
        machine.judge_cores(16, 16, 1.5, None),
        "warning",
        "16, but the control group's quota is 1.5: programs start 16 threads",
        "export OMP_NUM_THREADS=1",
    ),
    Case(machine.judge_cores(16, 16, 2.0, "2"), "ok", "OMP_NUM_THREADS=2 limits the threads"),
    Case(machine.judge_memory(64 * GIB, 60 * GIB, None), "ok", "60 GiB of 64 GiB available"),
    Case(
        machine.judge_memory(64 * GIB, 60 * GIB, Memory(80 * GIB, 10 * GIB)),
        "ok",
        "60 GiB of 64 GiB available",
    ),
    Case(
        machine.judge_memory(64 * GIB, 1 * GIB, None),
        "warning",
        "1 GiB of 64 GiB available: enough only for a small job",
        "stop other programs",
    ),
    Case(
        machine.judge_memory(64 * GIB, 60 * GIB, Memory(1 * GIB, 900 * MIB)),
        "failure",
        "124 MiB left of the control group's limit of 1 GiB",
        "docker run --memory",
    ),
    Case(
        machine.judge_memory(64 * GIB, 60 * GIB, Memory(1 * GIB, 2 * GIB)),
        "failure",
        "0 bytes left of the control group's limit of 1 GiB",
        "Kubernetes limits.memory",
    ),
    Case(machine.judge_shm(16 * GIB, 15 * GIB, ""), "ok", "15 GiB of 16 GiB free"),
    Case(
        machine.judge_shm(64 * MIB, 63 * MIB, ""),
        "warning",
        "63 MiB of 64 MiB free: can run out",
        "docker run --shm-size 1g",
    ),
    Case(
        machine.judge_shm(1 * MIB, 1 * MIB, ""),
        "failure",
        "not enough for one batch; DataLoader(num_workers=...) and NCCL need it",
        "mount -o remount,size=1g /dev/shm",
    ),
    Case(
        machine.judge_shm(0, 0, "there is no /dev/shm"),
        "failure",
        "there is no /dev/shm",
        "mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm",
    ),
    Case(machine.judge_shared(""), "ok", "can share memory"),
    Case(
        machine.judge_shared("[Errno 1] Operation not permitted"),
        "failure",
        "cannot create shared memory with memfd: [Errno 1] Operation not permitted",
        "ps-worker --transport zmq",
    ),
    Case(machine.judge_files(1024, 4096), "ok", "1024"),
    Case(machine.judge_files(-1, -1), "ok", "unlimited"),
    Case(machine.judge_files(256, -1), "warning", "at most 256", "ulimit -n 65536"),
    Case(machine.judge_files(256, 4096), "warning", "at most 256", "ulimit -n 4096"),
    Case(machine.judge_files(60, 60), "failure", "at most 60; a shard", "raise the hard limit of 60"),
    Case(machine.judge_memlock(-1, 1, []), "ok", "unlimited"),
    Case(machine.judge_memlock(8 * MIB, 0, []), "ok", "8 MiB; no GPU and no RDMA device here locks memory"),
    Case(
        machine.judge_memlock(8 * MIB, 2, ["mlx5_0"]),
        "warning",
        "8 MiB, and 2 GPU(s) and RDMA by mlx5_0 lock buffers in memory",
        "ulimit -l unlimited",
    ),
    Case(machine.judge_clock([1, 2, 2], datetime(2027, 1, 1, tzinfo=UTC)), "ok", "2027-01-01 00:00:00 UTC"),
    Case(
        machine.judge_clock([1, 9, 4], datetime(2027, 1, 1, tzinfo=UTC)),
        "failure",
        "went back by 5 ns",
        "current_clocksource",
    ),
    Case(
        machine.judge_clock([1, 2], datetime(1970, 1, 1, tzinfo=UTC)),
        "warning",
        "the clock shows 1970-01-01",
        "timedatectl",
    ),
]


@judgements(CASES)
def test_what_is_found_has_its_message_and_its_fix(case: Case) -> None:
    case.check()
