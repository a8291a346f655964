"""A shard's standby: the stream of changes that a primary forwards to it."""
