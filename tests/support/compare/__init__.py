"""Experiments that nobody ran, and their results."""
