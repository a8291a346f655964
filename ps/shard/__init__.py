"""The shard process: one loop around one store."""
