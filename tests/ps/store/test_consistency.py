"""Every mode, asked its two questions."""

from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, by_name


def test_nothing_is_applied_without_a_gradient() -> None:
    assert not any(rule.may_apply(0, live=0) for rule in (BSP(), ASP(), SSP(1), BackupWorkers(1)))


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
