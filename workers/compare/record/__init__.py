"""Results of an experiment: the types of `results.json` and the statistics of its numbers."""
