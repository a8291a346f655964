"""`DistributedOptimizer`: parameters and groups, the step, and checkpoints."""
