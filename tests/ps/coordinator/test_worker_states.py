"""The workers' states on the server: of the right step, of the right rank, and only states."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.protos import control_pb2 as pb
from hubring.ps.coordinator import worker_states
from hubring.ps.coordinator.worker_states import WorkerStates


def keep(states: WorkerStates, rank: int, step: int, content: bytes, *, shared: bool = False) -> None:
    """Sends a state in two parts, the first one twice."""
    half = len(content) // 2
    parts = [(0, content[:half], False), (0, content[:half], False), (half, content[half:], True)]
    for offset, part, last in parts:
        request = pb.KeepRequest(rank=rank, step=step, offset=offset, content=part, last=last, shared=shared)
        assert states.take(request) == ""


def in_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


async def test_a_checkpoint_has_the_states_of_its_step_and_the_last_frozen_parameters(tmp_path: Path) -> None:
    states, folder = WorkerStates(tmp_path), tmp_path / "checkpoint"
    folder.mkdir()
    keep(states, 0, 3, b"frozen", shared=True)
    for step, content in ((3, b"earlier"), (5, b"of step 5")):
        keep(states, 0, step, content)
    keep(states, 1, 3, b"of a rank that left")
    entries = await states.collect(folder, 5, lambda: [0])
    assert in_folder(folder) == {"rank-0.pt": b"of step 5", "shared.pt": b"frozen"}
    assert [(entry.name, entry.bytes, entry.keys) for entry in entries] == [
        ("rank-0.pt", 9, ()),
        ("shared.pt", 6, ()),
    ]


async def test_a_checkpoint_goes_without_a_state_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_states, "COLLECT_SECONDS", 0.0)
    states, folder = WorkerStates(tmp_path), tmp_path / "checkpoint"
    folder.mkdir()
    keep(states, 1, 3, b"earlier")
    assert await states.collect(folder, 5, lambda: [0, 1]) == ()
    assert "has no buffers and residuals of rank 1" in caplog.text, "rank 0 sends none at all"


def test_a_rank_without_a_state_gets_that_of_another_one(tmp_path: Path) -> None:
    (tmp_path / "rank-2.pt").write_bytes(b"two")
    states = WorkerStates(None)
    for rank, mine in ((2, True), (3, False)):
        found = states.answer(pb.KeptRequest(rank=rank), tmp_path, [])
        assert (found.own, found.mine, found.shared) == ("rank-2.pt", mine, "")
        part = states.answer(pb.KeptRequest(rank=rank, name=found.own, offset=1), tmp_path, [])
        assert (part.content, part.total) == (b"wo", 3)


@pytest.mark.parametrize("name", ["../secret.pt", "manifest.json", "rank-0.pt/../secret", "rank-0.7"])
def test_only_states_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.pt").write_bytes(b"secret")
    (tmp_path / "manifest.json").write_bytes(b"secret")
    assert WorkerStates(None).answer(pb.KeptRequest(name=name), tmp_path, []) == pb.KeptReply()


def part_of(rank: int, offset: int, content: bytes, *, last: bool = False) -> pb.KeepRequest:
    incarnation = bytes([rank] * 16)
    return pb.KeepRequest(
        rank=rank, incarnation=incarnation, step=3, offset=offset, content=content, last=last, shared=True
    )


def test_two_ranks_that_send_the_shared_state_at_once_do_not_mix_it(tmp_path: Path) -> None:
    states, path = WorkerStates(tmp_path), tmp_path / ".workers" / "shared.3"
    for request in (part_of(0, 0, b"abcd"), part_of(0, 4, b"efgh"), part_of(1, 0, b"abcd")):
        assert states.take(request) == ""
    assert states.take(part_of(0, 8, b"ij", last=True)) == ""
    assert path.read_bytes() == b"abcdefghij"
    assert states.take(part_of(0, 8, b"ij", last=True)) == "", "its reply was lost"
    assert "has 4 bytes" in states.take(part_of(1, 8, b"ij", last=True))
    assert "without its beginning" in states.take(part_of(2, 8, b"ij"))
    assert path.read_bytes() == b"abcdefghij"


def test_an_incomplete_state_of_an_earlier_life_is_removed(tmp_path: Path) -> None:
    for life, last in ((b"first", False), (b"second", True)):
        assert WorkerStates(tmp_path).take(pb.KeepRequest(incarnation=life, content=b"own", last=last)) == ""
    assert in_folder(tmp_path / ".workers") == {"rank-0.0": b"own"}


def test_a_state_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    assert "offset -1" in WorkerStates(tmp_path).take(part_of(0, -1, b"abcd"))
    assert "cannot write to" in WorkerStates(tmp_path / "gone").take(part_of(0, 0, b"abcd"))


def test_each_rank_is_asked_once_and_the_lowest_one_for_the_shared_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = WorkerStates(tmp_path)
    states.ask([2, 1])
    assert [states.wish(rank) for rank in (0, 1, 2)] == [(False, False), (True, True), (True, False)]
    assert states.wish(1) == (False, False)
    monkeypatch.setattr(worker_states, "REPEAT_SECONDS", -1.0)
    keep(states, 2, 3, b"shared", shared=True)
    assert states.wish(2) == (True, False), "nothing came for a long time"
    keep(states, 2, 3, b"own")
    assert states.wish(2) == (False, False)
