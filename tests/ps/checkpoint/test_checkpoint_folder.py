"""What is on the disk: whole, damaged, locked, or of a user who may not read it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from hubring.ps.checkpoint import checkpoint_folder
from hubring.ps.checkpoint.checkpoint_folder import UNSIGNED_FORMAT, FileEntry, Manifest, lock_directory
from hubring.ps.core.errors import CheckpointCorrupt, ConfigError
from hubring.ps.core.types import BucketSpec, Slice, TensorSpec

BUCKETS = (BucketSpec(0, "float32", "SGD", (TensorSpec("weight", (2, 2)),)),)
SLICES = (Slice(0, 0, 0, 4, 0),)


def write(directory: Path, step: int) -> Path:
    folder = checkpoint_folder.begin(directory)
    path = folder / "shard-0.safetensors"
    path.write_bytes(b"tensors")
    entry = FileEntry(path.name, checkpoint_folder.digest(path), 7, (0,))
    return checkpoint_folder.publish(folder, Manifest("job", "bsp", step, 7, BUCKETS, SLICES, (entry,)))


def loaded(directory: Path) -> Path:
    found = checkpoint_folder.newest(directory)
    assert found is not None
    return found[0]


def test_a_published_checkpoint_is_read_back(tmp_path: Path) -> None:
    folder = write(tmp_path, 12)
    found = checkpoint_folder.newest(tmp_path)
    assert found is not None
    path, read = found
    assert path == folder
    assert (read.step, read.next_incarnation, read.buckets, read.slices) == (12, 7, BUCKETS, SLICES)
    assert [entry.name for entry in read.files] == ["shard-0.safetensors"]


def test_an_empty_directory_holds_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_folder.newest(tmp_path) is None
    assert checkpoint_folder.newest(tmp_path / "missing") is None


def test_the_newest_is_the_last_written_whatever_its_step(tmp_path: Path) -> None:
    write(tmp_path, 30)
    last = write(tmp_path, 20)
    assert loaded(tmp_path) == last


def test_the_newest_is_passed_over_if_this_user_cannot_search_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = write(tmp_path, 1), write(tmp_path, 2)
    exists = Path.exists

    def denied(path: Path) -> bool:
        if path.parent == newest:  # as the system does for a user other than root
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    assert loaded(tmp_path) == before
    assert "Permission denied" in caplog.text
    assert "trying the previous checkpoint" in caplog.text


def test_a_checkpoints_files_and_its_folder_are_on_the_disk_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = checkpoint_folder.sync

    def noted(path: Path) -> None:
        assert path.exists()
        synced.append(path)
        sync(path)

    monkeypatch.setattr(checkpoint_folder, "sync", noted)
    folder = write(tmp_path, 1)
    hidden = synced[0].parent
    assert hidden.name.startswith(".writing-")
    assert synced == [hidden / "manifest.json", hidden / "manifest.sha256", hidden, folder.parent]


def test_a_file_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"tensors")
    folder = checkpoint_folder.begin(tmp_path / "saved")
    entry = FileEntry("../../secret", checkpoint_folder.digest(tmp_path / "secret"), 7, (0,))
    path = checkpoint_folder.publish(folder, Manifest("job", "bsp", 1, 1, BUCKETS, SLICES, (entry,)))
    with pytest.raises(CheckpointCorrupt, match=r"lists the file '\.\./\.\./secret', which is invalid"):
        checkpoint_folder.read(path)


def test_a_half_written_folder_is_no_checkpoint_and_is_cleared_away(tmp_path: Path) -> None:
    stale = checkpoint_folder.begin(tmp_path)
    (stale / "shard-0.safetensors").write_bytes(b"half")
    assert checkpoint_folder.newest(tmp_path) is None
    write(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-1"]


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_folder, "sync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write(tmp_path, 1)


def test_an_old_checkpoint_that_cannot_be_removed_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, *_ = [write(tmp_path, step) for step in range(checkpoint_folder.KEEP)]
    remove = shutil.rmtree

    def busy(folder: Path) -> None:
        if folder == stuck:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", busy)
    for step in (10, 11):
        found = write(tmp_path, step)
        assert checkpoint_folder.newest(tmp_path) == (found, checkpoint_folder.read(found))
    assert f"cannot remove the old checkpoint {stuck}: [Errno 39] Directory not empty" in caplog.text
    kept = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir())
    assert kept == [0, 2, 10, 11]


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot read checkpoints"):
        checkpoint_folder.newest(tmp_path / "file")


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("1st-step-one", "7-step-3"):
        (tmp_path / name).mkdir()
    assert checkpoint_folder.newest(tmp_path) is None
    assert write(tmp_path, 4).name == "000001-step-4"


def test_no_file_is_loaded_without_its_end(tmp_path: Path) -> None:
    """The tests of `tests.campaign.flips` turn bits."""
    before, newest = write(tmp_path, 1), write(tmp_path, 2)
    files = sorted(newest.iterdir())
    assert [file.name for file in files] == ["manifest.json", "manifest.sha256", "shard-0.safetensors"]
    for file in files:
        content = file.read_bytes()
        for end in range(0, len(content), 7):
            file.write_bytes(content[:end])
            assert loaded(tmp_path) == before
        file.write_bytes(content)
    assert loaded(tmp_path) == newest


def test_the_digest_of_the_manifest_is_one_that_sha256sum_reads(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert (folder / "manifest.sha256").read_text() == f"{digest}  manifest.json\n"


def older(folder: Path, number: int = UNSIGNED_FORMAT) -> None:
    """Makes a checkpoint of a format without a digest."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(msgspec.json.encode({**manifest, "format": number}))
    (folder / "manifest.sha256").unlink()


def test_a_checkpoint_from_before_the_digest_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    older(folder)
    assert checkpoint_folder.read(folder).step == 1


def test_a_digest_that_is_missing_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    (folder / "manifest.sha256").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"has format 2 without manifest\.sha256; expected format 1"):
        checkpoint_folder.read(folder)


def test_bytes_that_are_no_text_in_an_older_manifest_are_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    older(folder)
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text.replace(b"weight", b"we\xffght"))
    with pytest.raises(CheckpointCorrupt, match="cannot read"):
        checkpoint_folder.read(folder)


def test_a_claim_sweeps_nothing_that_another_process_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    writing = checkpoint_folder.begin(tmp_path)
    monkeypatch.setattr(fcntl, "lockf", locked)
    with pytest.raises(ConfigError, match="is locked by another process"):
        lock_directory(tmp_path)
    assert writing.is_dir()


def test_where_nothing_can_be_locked_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    lock_directory(tmp_path).close()
    assert f"cannot lock {tmp_path} (No locks available)" in caplog.text
