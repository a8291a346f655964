"""Artificial delays for experiments."""
