"""`ps-worker bench`: times one exchange, and compares it with peers and with the machine's limits."""
