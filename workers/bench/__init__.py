"""How long one exchange takes, hub against ring: `python -m workers.bench`."""
