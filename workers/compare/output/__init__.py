"""Findings as tables, logs and scalars."""
