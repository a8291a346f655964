"""Every mode, asked its two questions."""

from __future__ import annotations

from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, by_name


def test_nothing_is_applied_without_a_gradient() -> None:
    assert not any(rule.may_apply(0, live=0) for rule in (BSP(), ASP(), SSP(1), BackupWorkers(1)))


def test_a_name_with_its_constants_makes_the_rule() -> None:
    assert by_name("bsp") == BSP()
    assert by_name("asp") == ASP()
    assert by_name("ssp", staleness=3) == SSP(3)
    assert by_name("backup", backup=1) == BackupWorkers(1)
