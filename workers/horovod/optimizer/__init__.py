"""DistributedOptimizer, under the names of `horovod.torch.optimizer`."""

from __future__ import annotations

from hubring.workers.horovod.optimizer.distributed import (
    DistributedOptimizer,
    _DistributedAdasumOptimizer,
    _DistributedOptimizer,
)

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
