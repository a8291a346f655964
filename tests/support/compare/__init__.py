"""Simulated experiments and their results."""
