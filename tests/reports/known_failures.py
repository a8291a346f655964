"""Tests that fail today, and why."""

from __future__ import annotations

KNOWN: dict[str, tuple[str, str]] = {}
RACES: frozenset[str] = frozenset()
