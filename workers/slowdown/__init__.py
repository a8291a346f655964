"""Slows workers down in an experiment: how long a worker sleeps, and where in a step."""
