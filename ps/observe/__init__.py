"""Logs, journal, health and metrics."""
