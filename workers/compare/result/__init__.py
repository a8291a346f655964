"""Results of an experiment: the types of `results.json` and what its readers share."""
