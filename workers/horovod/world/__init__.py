"""Horovod's world: init, rank, size, process sets, what was built."""
