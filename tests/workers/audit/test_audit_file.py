"""What is written is read, as far as it is complete."""

from __future__ import annotations

from pathlib import Path

from hubring.workers.audit.audit_file import AuditFile, ModelLayout, Step, read


def layout() -> ModelLayout:
    return ModelLayout(
        trainer=0,
        rank=1,
        optimizer="SGD",
        steps_on="worker",
        names=["w"],
        dtypes=["float32"],
        counts=[2],
        groups=[0],
    )


def step(number: int) -> Step:
    return Step(0, number, [{"lr": 0.1}], 1.0, False, b"own", b"\1", b"", b"", b"\1", b"before", b"after")


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    entries: list[ModelLayout | Step] = [layout(), step(1), step(2)]
    with AuditFile(tmp_path / "audit") as file:
        for entry in entries:
            file.write(entry)
    assert list(read(tmp_path / "audit")) == entries


def test_the_cut_off_end_of_a_killed_worker_is_left_out(tmp_path: Path) -> None:
    with AuditFile(tmp_path / "audit") as file:
        file.write(layout())
        file.write(step(1))
    whole = (tmp_path / "audit").read_bytes()
    for missing in (1, 20, len(whole) - 2):
        (tmp_path / "audit").write_bytes(whole[:-missing])
        assert step(1) not in list(read(tmp_path / "audit"))
