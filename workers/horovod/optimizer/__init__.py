"""Horovod's `DistributedOptimizer`, `SyncBatchNorm` and parameter broadcasts."""
