"""DistributedOptimizer: wraps the script's optimizer, and reduces gradients over all ranks.

This package's allreduces reduce the gradients while backward still runs, and the script's optimizer takes the
step. With a hub too, the hub only reduces.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer

from hubring.workers.horovod.compression import Compression, Compressor
from hubring.workers.horovod.optimizer.adasum import DeltaOptimizer
from hubring.workers.horovod.optimizer.averaging import AveragingOptimizer, reduction
from hubring.workers.horovod.optimizer.gradient_group import Groups
from hubring.workers.horovod.optimizer.wrapped import NamedParameters
from hubring.workers.horovod.reduce_ops import Adasum, Average
from hubring.workers.horovod.world.process_set import ProcessSet, global_process_set
from hubring.workers.horovod.world.world import current

_DistributedOptimizer = AveragingOptimizer
_DistributedAdasumOptimizer = DeltaOptimizer


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: NamedParameters = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that its gradients are reduced over all ranks.

    Args:
        optimizer: The optimizer to wrap; the result shares its groups and state.
        named_parameters: Names of all parameters, which match the exchanges across ranks.
        compression: Compresses gradients for the exchange.
        backward_passes_per_step: Number of backward passes whose gradients one step sums.
        op: `hvd.Average`, `hvd.Sum`, or `hvd.Adasum`, which reduces the changes of local steps.
        gradient_predivide_factor: Divides gradients before the sum; the average does not change.
        num_groups: The older form of `groups`.
        groups: Number of exchanges per step, or lists of the parameters of each exchange; None: exchanges of
            HOROVOD_FUSION_THRESHOLD bytes, by default 4 MiB.
        sparse_as_dense: Whether to send sparse gradients as dense tensors.
        process_set: The ranks that take part; other ranks step alone.

    Returns:
        An instance of a class that is derived from the optimizer's class and has its name.

    Raises:
        ValueError: Names are missing, duplicate or invalid; or another argument is invalid.
        NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
    """
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; expected at least 1")
    if op == Adasum and current().size > 1:
        reduction(op, gradient_predivide_factor, process_set)
        delta = _derived(optimizer, DeltaOptimizer)
        delta.wrap(named_parameters, compression, backward_passes_per_step, groups)
        return delta
    made = _derived(optimizer, AveragingOptimizer)
    made.wrap(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )
    return made


def _derived(optimizer: Optimizer, front: type) -> Any:
    """Returns the same optimizer as an instance of its class with `front` as a mixin."""
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (front, kind), {"__module__": kind.__module__}))
    # A scheduler sets a wrapper of the old `step` on the optimizer. The new optimizer must not have it.
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return made
