"""Mean and step: the optimizers of a shard, and their compiled loops."""
