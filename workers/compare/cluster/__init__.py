"""Experiments over the tasks that a launcher started: rank 0 conducts, the others follow."""
