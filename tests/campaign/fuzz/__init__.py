"""Garbage for every port on which a job listens."""
