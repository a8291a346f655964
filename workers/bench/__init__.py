"""How long one exchange takes, beside others' and beside the machine's limits: `ps-worker bench`."""
