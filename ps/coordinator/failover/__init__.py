"""Standbys of shards: which one follows which shard, and when it takes its place."""
