"""The shard process: one loop that runs one store, and the stream of its changes to a standby."""
