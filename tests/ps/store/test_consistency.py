"""Modes by name."""

from __future__ import annotations

from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, by_name


def test_a_name_with_its_constants_makes_the_rule() -> None:
    assert by_name("bsp") == BSP()
    assert by_name("asp") == ASP()
    assert by_name("ssp", staleness=3) == SSP(3)
    assert by_name("backup", backup=1) == BackupWorkers(1)
