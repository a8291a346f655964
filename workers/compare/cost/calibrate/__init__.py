"""Measures the constants of the machine at hand."""
