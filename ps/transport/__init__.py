"""Transports: they move opaque messages between workers and shards."""
