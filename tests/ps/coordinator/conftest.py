"""What tests of the coordinator share."""

from __future__ import annotations

import pytest


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for others is answered at once."""
    monkeypatch.setattr("hubring.ps.coordinator.joining.PATIENCE", 0.01)
