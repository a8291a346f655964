from __future__ import annotations

from tests.reports.table import README, readme


def test_the_table_has_what_the_tests_check_today() -> None:
    assert README.read_text() == readme(), "run python -m tests.reports.table"
