"""The folder for checkpoints: what the doctor says of it, and what it reads."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hubring.ps.doctor import disk
from hubring.ps.doctor.disk import Disk
from hubring.ps.doctor.finding import GIB, MIB
from tests.ps.doctor.case import Case, judgements, only

DIR = Disk(Path("/saved/run"), Path("/saved"), 0, 0.004, 40 * GIB, "ext4", 2 * GIB)

CASES = [
    Case(disk.judge(DIR), "ok", "/saved/run: 40 GiB free, 1 MiB synced in 4 ms"),
    Case(
        disk.judge(DIR._replace(refusal=errno.ENOSPC)),
        "failure",
        "/saved is full",
        "free some space (df -h /saved)",
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EDQUOT)), "failure", "/saved is full (Disk quota", "free some"
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EROFS)), "failure", "/saved is read-only", "mount -o remount,rw"
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EACCES, tried=DIR.folder)),
        "failure",
        "cannot write to /saved/run (Permission denied)",
        "chown -R",
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.EACCES)),
        "failure",
        "cannot write to /saved (Permission denied)",
        "install -d -o",
    ),
    Case(
        disk.judge(DIR._replace(refusal=errno.ENOTDIR)),
        "failure",
        "is not a folder",
        "another --checkpoint-dir",
    ),
    Case(disk.judge(DIR._replace(refusal=errno.EIO)), "failure", "Input/output error", "dmesg"),
    Case(
        disk.judge(DIR._replace(free=1 * GIB)),
        "failure",
        "1 GiB free, but the newest checkpoint takes 2 GiB",
        "free some space (df -h /saved)",
    ),
    Case(disk.judge(DIR._replace(free=100 * MIB, newest=0)), "warning", "only 100 MiB free", "free some"),
    Case(disk.judge(DIR._replace(kind="overlay")), "warning", "lost with the container", "docker run -v"),
    Case(
        disk.judge(DIR._replace(kind="tmpfs")),
        "warning",
        "lost when this machine restarts",
        "a volume or a disk",
    ),
    Case(disk.judge(DIR._replace(seconds=2.5)), "warning", "1 MiB took 2.5 s to sync", "a local disk"),
    Case(only(disk.examine(None)), "skipped", "not set (--checkpoint-dir, PS_CHECKPOINT_DIR)"),
]


@judgements(CASES)
def test_what_is_found_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


MOUNTS = [
    (Path("/"), "ext4"),
    (Path("/saved"), "nfs4"),
    (Path("/saved/a b"), "tmpfs"),
    (Path("/saved"), "xfs"),
]


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/run", "ext4"), ("/saved/run", "xfs"), ("/saved/a b/c", "tmpfs"), ("/savedly", "ext4")],
)
def test_the_innermost_mount_counts_and_of_those_the_last(folder: str, kind: str) -> None:
    assert disk.file_system(MOUNTS, Path(folder)) == kind


def test_a_folder_that_is_not_there_yet_is_tried_above_and_not_made(tmp_path: Path) -> None:
    found = only(disk.examine(tmp_path / "not" / "yet"))
    assert str(tmp_path / "not" / "yet") in found.found
    assert found.state != "failure"
    assert [*tmp_path.iterdir()] == []


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    found = only(disk.examine(tmp_path / "taken" / "run"))
    assert (found.state, found.found) == ("failure", f"{tmp_path / 'taken'} is not a folder")


def test_the_newest_checkpoint_tells_how_large_the_next_will_be(tmp_path: Path) -> None:
    for name, count in (("000009-step-90", 10), ("000010-step-100", 20), (".writing-7", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard0").write_bytes(bytes(count))
    assert disk.look(tmp_path).newest == 20
