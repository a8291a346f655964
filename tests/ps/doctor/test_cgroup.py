"""Limits of control groups of both versions, read from folders that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.ps.doctor.cgroup import Cgroup, Memory

MIB = 1 << 20
UNLIMITED = 0x7FFFFFFFFFFFF000


class Tree:
    """A process's two files in /proc, and the groups that they name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._membership: list[str] = []
        self._mounts = ["22 27 0:21 / /proc rw,relatime - proc proc rw"]

    def two(self, path: str, root: str = "/") -> None:
        self._membership.append(f"0::{path}")
        self._mounts.append(f"29 23 0:26 {root} {self._folder}/two rw,nosuid shared:9 - cgroup2 cgroup2 rw")

    def one(self, controllers: str, path: str, root: str = "/") -> None:
        self._membership.append(f"4:{controllers}:{path}")
        self._mounts.append(
            f"32 31 0:29 {root} {self._folder}/{controllers} rw - cgroup cgroup rw,{controllers}"
        )

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


def test_a_quota_is_spelt_in_cores(tree: Tree) -> None:
    tree.two("/job")
    tree.write("two/job/cpu.max", "150000 100000")
    assert tree.read().cores() == 1.5


def test_the_least_of_all_groups_above_counts(tree: Tree) -> None:
    tree.two("/pod/job")
    tree.write("two/pod/job/cpu.max", "max 100000")
    tree.write("two/pod/cpu.max", "200000 100000")
    tree.write("two/cpu.max", "400000 100000")
    assert tree.read().cores() == 2


def test_no_limit_is_none(tree: Tree) -> None:
    tree.two("/")
    tree.one("cpu,cpuacct", "/job")
    tree.one("memory", "/job")
    tree.write("two/cgroup.procs", "1")
    tree.write("cpu,cpuacct/job/cpu.cfs_quota_us", -1)
    tree.write("cpu,cpuacct/job/cpu.cfs_period_us", 100000)
    tree.write("memory/job/memory.limit_in_bytes", UNLIMITED)
    group = tree.read()
    assert group.cores() is None
    assert group.memory() is None


def test_version_one_is_read_where_its_controller_is_mounted(tree: Tree) -> None:
    tree.two("/")
    tree.one("cpu,cpuacct", "/job")
    tree.one("memory", "/job")
    tree.write("cpu,cpuacct/job/cpu.cfs_quota_us", 50000)
    tree.write("cpu,cpuacct/job/cpu.cfs_period_us", 100000)
    tree.write("memory/job/memory.limit_in_bytes", 512 * MIB)
    tree.write("memory/job/memory.usage_in_bytes", 200 * MIB)
    tree.write("memory/job/memory.stat", f"inactive_file 1\ntotal_inactive_file {50 * MIB}")
    group = tree.read()
    assert group.cores() == 0.5
    assert group.memory() == Memory(512 * MIB, 150 * MIB)


def test_pages_that_can_be_dropped_count_as_free(tree: Tree) -> None:
    tree.two("/job")
    tree.write("two/job/memory.max", 512 * MIB)
    tree.write("two/job/memory.current", 200 * MIB)
    tree.write("two/job/memory.stat", f"anon 7\ninactive_file {150 * MIB}")
    tree.write("two/memory.max", "max")
    assert tree.read().memory() == Memory(512 * MIB, 50 * MIB)


def test_the_group_with_the_least_left_counts_not_the_smallest(tree: Tree) -> None:
    tree.two("/pod/job")
    for group, limit, used in (("pod/job", 512, 100), ("pod", 1024, 1000)):
        tree.write(f"two/{group}/memory.max", limit * MIB)
        tree.write(f"two/{group}/memory.current", used * MIB)
        tree.write(f"two/{group}/memory.stat", "inactive_file 0")
    assert tree.read().memory() == Memory(1024 * MIB, 1000 * MIB)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/"])
def test_in_a_container_the_mount_may_begin_at_the_group(tree: Tree, path: str) -> None:
    tree.two(path, root="/docker/abc")
    tree.write("two/cpu.max", "300000 100000")
    assert tree.read().cores() == 3


def test_a_machine_without_control_groups_has_no_limits(tree: Tree) -> None:
    assert tree.read().cores() is None
    assert tree.read().memory() is None


def test_this_machines_own_are_read() -> None:
    group = Cgroup()
    assert (group.cores() or 1) > 0
    memory = group.memory()
    assert memory is None or memory.limit > memory.used > 0
