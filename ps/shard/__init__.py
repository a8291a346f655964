"""The shard process: one loop that runs one store."""
