"""`DistributedOptimizer`: hooks, exchange, step, checkpoints."""
