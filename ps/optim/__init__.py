"""Mean and step: optimizers that run on a shard, and the loops they run."""
