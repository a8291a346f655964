"""Mistakes and mishaps, and what the one who waits is told of each: `tests.system.mishaps.table` has all."""
