"""A worker's connections to the coordinator and the shards."""
