"""Experiments on the tasks of a launcher: rank 0 conducts, the other ranks follow."""
