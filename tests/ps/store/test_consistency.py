"""Every mode, asked its two questions."""

from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, by_name


def test_bsp_waits_for_every_live_worker() -> None:
    assert [BSP().may_apply(contributors, live=3) for contributors in (1, 2, 3)] == [False, False, True]


def test_backup_workers_leave_out_the_slowest_but_never_all() -> None:
    rule = BackupWorkers(2)
    assert [rule.may_apply(contributors, live=5) for contributors in (2, 3)] == [False, True]
    assert not rule.may_apply(0, live=2)
    assert rule.may_apply(1, live=1)


def test_nothing_is_applied_without_a_gradient() -> None:
    assert not any(rule.may_apply(0, live=0) for rule in (BSP(), ASP(), SSP(1), BackupWorkers(1)))


def test_asynchronous_modes_apply_each_push_and_only_ssp_makes_readers_wait() -> None:
    assert ASP().may_apply(1, live=9)
    assert SSP(2).may_apply(1, live=9)
    assert ASP().may_read(1000, [0, 1000])
    assert SSP(2).may_read(3, [1, 3])
    assert not SSP(2).may_read(4, [1, 4])


def test_ssp_without_slack_has_the_bound_of_bsp() -> None:
    for clocks in ([1, 1], [1, 2], [2, 5]):
        clock = max(clocks)
        assert SSP(0).may_read(clock, clocks) == BSP().may_read(clock, clocks) == (len(set(clocks)) == 1)


def test_nobody_alive_holds_nobody_up() -> None:
    assert BSP().may_read(7, [])


def test_a_name_with_its_constants_makes_the_rule() -> None:
    assert by_name("bsp") == BSP()
    assert by_name("asp") == ASP()
    assert by_name("ssp", staleness=3) == SSP(3)
    assert by_name("backup", backup=1) == BackupWorkers(1)


@pytest.mark.parametrize(
    ("mode", "staleness", "backup", "named"),
    [
        ("sync", 0, 0, "--mode sync is invalid; use bsp, asp, ssp or backup"),
        ("bsp", 3, 0, "--staleness 3 is invalid with --mode bsp"),
        ("ssp", -1, 0, "--staleness -1"),
        ("ssp", 0, 2, "--backup 2 is invalid with --mode ssp"),
        ("backup", 0, 0, "--backup 0 .* a whole number of at least 1"),
    ],
)
def test_a_constant_that_does_not_fit_is_named(mode: str, staleness: int, backup: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        by_name(mode, staleness, backup)
