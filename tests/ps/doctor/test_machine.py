"""Memory, the checkpoint folder and clocks: what the doctor says of them; limits of control groups."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hubring.ps.doctor import machine
from hubring.ps.doctor.check import GIB, MIB
from hubring.ps.doctor.machine import Cgroup, CgroupMemory
from tests.ps.doctor.case import Case, fails, fine, judgements, omits, only, warns

DIR = Path("/saved/run")

memory, disk = machine.judge_memory, machine.judge_disk
FULL, OVERFULL = CgroupMemory(1 * GIB, 900 * MIB), CgroupMemory(1 * GIB, 2 * GIB)

CASES = [
    fine(memory(64 * GIB, 60 * GIB, CgroupMemory(80 * GIB, 10 * GIB)), "60 GiB of 64 GiB available"),
    warns(memory(64 * GIB, 1 * GIB, None), "enough only for a small job", "stop other programs"),
    fails(memory(64 * GIB, 60 * GIB, FULL), "124 MiB left of the control group's limit of 1 GiB", "--memory"),
    fails(memory(64 * GIB, 60 * GIB, OVERFULL), "0 bytes left of the control group's", "limits.memory"),
    warns(machine.judge_shm(64 * MIB, 63 * MIB), "63 MiB of 64 MiB free: can run out", "--shm-size 1g"),
    fails(machine.judge_shm(1 * MIB, 1 * MIB), "not enough for one batch", "mount -o remount,size=1g"),
    fails(machine.judge_shared("[Errno 1]"), "with memfd: [Errno 1]", "ps-worker --transport zmq"),
    warns(machine.judge_clock(datetime(1970, 1, 1, tzinfo=UTC)), "shows 1970-01-01", "timedatectl"),
    fails(
        disk(DIR, 0.004, 1 * GIB, "ext4", 2 * GIB), "the newest checkpoint takes 2 GiB", "df -h /saved/run"
    ),
    warns(disk(DIR, 0.004, 100 * MIB, "ext4", 0), "only 100 MiB free", "free some"),
    warns(disk(DIR, 0.004, 40 * GIB, "overlay", 0), "lost with the container", "docker run -v"),
    warns(disk(DIR, 0.004, 40 * GIB, "tmpfs", 0), "lost when this machine restarts", "a volume or a disk"),
    warns(disk(DIR, 2.5, 40 * GIB, "ext4", 0), "1 MiB synced in 2.5e+03 ms", "a local disk"),
    omits(only(machine.examine_disk(None)), "not set (--checkpoint-dir, PS_CHECKPOINT_DIR)"),
]


@judgements(CASES)
def test_each_finding_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


def test_the_kind_of_file_system_is_the_kernels_name() -> None:
    assert machine.file_system(Path("/proc")) == "proc"


def test_a_folder_that_is_not_there_yet_is_tried_above_and_not_made(tmp_path: Path) -> None:
    found = only(machine.examine_disk(tmp_path / "not" / "yet"))
    assert str(tmp_path / "not" / "yet") in found.found
    assert found.state != "failure"
    assert [*tmp_path.iterdir()] == []


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    found = only(machine.examine_disk(tmp_path / "taken" / "run"))
    words = f"cannot write to {tmp_path / 'taken'}: Not a directory"
    assert (found.state, found.found) == ("failure", f"user {os.geteuid()} {words}")


def test_the_newest_checkpoint_tells_how_large_the_next_will_be(tmp_path: Path) -> None:
    for name, count in (("000009-step-90", 10), ("000010-step-100", 20), (".writing-7", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard0").write_bytes(bytes(count))
    assert machine.newest_bytes(tmp_path) == 20


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_folder_that_is_memory_or_full_is_told(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3g", "tmpfs", str(tmp_path)], check=True)
    try:
        memory = only(machine.examine_disk(tmp_path))
        assert (memory.state, [*tmp_path.iterdir()]) == ("warning", [])
        subprocess.run(["mount", "-o", "remount,size=4k", str(tmp_path)], check=True)
        full = only(machine.examine_disk(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert "lost when this machine restarts" in memory.found
    assert (full.state, full.found.endswith("No space left on device")) == ("failure", True)


class Tree:
    """A process's two files in /proc, and the groups that they name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._membership: list[str] = []
        self._mounts = ["22 27 0:21 / /proc rw,relatime - proc proc rw"]

    def two(self, path: str, root: str = "/") -> None:
        self._membership.append(f"0::{path}")
        self._mounts.append(f"29 23 0:26 {root} {self._folder}/two rw,nosuid shared:9 - cgroup2 cgroup2 rw")

    def write(self, name: str, text: str | int) -> None:
        file = self._folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def read(self) -> Cgroup:
        (self._folder / "cgroup").write_text("\n".join(self._membership))
        self.write("mountinfo", "\n".join(self._mounts))
        return Cgroup(self._folder)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_least_of_all_groups_above_counts(tree: Tree) -> None:
    tree.two("/pod/job")
    tree.write("two/pod/job/cpu.max", "max 100000")
    tree.write("two/pod/cpu.max", "200000 100000")
    tree.write("two/cpu.max", "400000 100000")
    assert tree.read().cores() == 2


def test_no_limit_is_none(tree: Tree) -> None:
    tree.two("/")
    tree.write("two/cpu.max", "max 100000")
    tree.write("two/memory.max", "max")
    group = tree.read()
    assert group.cores() is None
    assert group.memory() is None


def test_pages_that_can_be_dropped_count_as_free(tree: Tree) -> None:
    tree.two("/job")
    tree.write("two/job/memory.max", 512 * MIB)
    tree.write("two/job/memory.current", 200 * MIB)
    tree.write("two/job/memory.stat", f"anon 7\ninactive_file {150 * MIB}")
    tree.write("two/memory.max", "max")
    assert tree.read().memory() == CgroupMemory(512 * MIB, 50 * MIB)


def test_the_group_with_the_least_left_counts_not_the_smallest(tree: Tree) -> None:
    tree.two("/pod/job")
    for group, limit, used in (("pod/job", 512, 100), ("pod", 1024, 1000)):
        tree.write(f"two/{group}/memory.max", limit * MIB)
        tree.write(f"two/{group}/memory.current", used * MIB)
        tree.write(f"two/{group}/memory.stat", "inactive_file 0")
    assert tree.read().memory() == CgroupMemory(1024 * MIB, 1000 * MIB)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/"])
def test_in_a_container_the_mount_may_begin_at_the_group(tree: Tree, path: str) -> None:
    tree.two(path, root="/docker/abc")
    tree.write("two/cpu.max", "300000 100000")
    assert tree.read().cores() == 3


def test_a_machine_without_control_groups_has_no_limits(tree: Tree) -> None:
    assert tree.read().cores() is None
    assert tree.read().memory() is None
