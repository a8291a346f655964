from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.recovery.coordinator_state import ServerRecord, ServerState, capture
from hubring.ps.recovery.succession import StateDamaged, StateFile, encode_state
from hubring.ps.store.consistency import BSP
from tests.support.fakes.clock import FakeTime
from tests.support.fakes.coordinator import run


def state() -> bytes:
    async def story() -> bytes:
        coordinator = Coordinator(ServerConfig(), Fleet(5.0), BSP(), FakeTime(), None)
        return encode_state(
            ServerState(ServerRecord(5555, [15], None, None, []), capture(coordinator), {0: 7})
        )

    return run(story())


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    file = StateFile(tmp_path / "5555.state")
    file.write(state())
    return file


def test_a_state_is_read_as_it_was_written(file: StateFile) -> None:
    assert encode_state(file.read()) == state()
    assert file.read().steps == {0: 7}


def test_only_its_user_can_read_a_state(file: StateFile) -> None:
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_flipped_bit_is_noticed(file: StateFile) -> None:
    data, chance = file.path.read_bytes(), random.Random(1)
    for _ in range(300):
        place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        file.path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        with pytest.raises(StateDamaged, match="missing or damaged"):
            file.read()


def test_a_torn_and_a_missing_file_are_noticed(file: StateFile) -> None:
    data = file.path.read_bytes()
    for end in range(0, len(data), 7):
        file.path.write_bytes(data[:end])
        with pytest.raises(StateDamaged, match="Restart the server with the same --checkpoint-dir"):
            file.read()
    file.path.unlink()
    with pytest.raises(StateDamaged, match=r"5555\.state is missing or damaged"):
        file.read()


def test_a_state_is_replaced_in_one_piece(file: StateFile) -> None:
    with file.path.open("rb") as before:
        file.write(encode_state("a later state"))
        assert before.read().endswith(state())
    assert file.path.read_bytes().endswith(b'"a later state"')
    assert list(file.path.parent.iterdir()) == [file.path]


def test_a_state_that_cannot_be_deleted_is_emptied(file: StateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: Path, missing_ok: bool = False) -> None:
        raise OSError(16, "Device or resource busy")

    assert file.read()
    monkeypatch.setattr(Path, "unlink", busy)
    file.remove()
    with pytest.raises(StateDamaged):
        file.read()
