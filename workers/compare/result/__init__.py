"""What an experiment found: the types of `results.json`, and what everything that reads them needs."""
