"""Experiments: rows, settings and the plan of all runs."""
