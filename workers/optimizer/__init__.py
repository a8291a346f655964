"""`DistributedOptimizer`: hooks, exchange, step and checkpoints."""
