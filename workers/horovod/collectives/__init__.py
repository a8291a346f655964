"""Horovod's collectives."""
