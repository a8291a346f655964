"""Horovod's world: init, rank, size, process sets, and build information."""
