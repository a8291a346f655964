"""The names of `horovod.torch.functions`."""

from __future__ import annotations

from hubring.workers.horovod.collectives.objects import allgather_object, broadcast_object
from hubring.workers.horovod.optimizer.parameters import broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
