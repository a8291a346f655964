"""Measures the constants of this machine."""
