"""The part of a sharded parameter that this rank holds."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor


def shard(tensor: Tensor) -> tuple[int, int]:
    """Returns where this rank's part of a tensor begins in the flat tensor, and its number of elements.

    Torch divides a parameter along its first dimension. An ordinary tensor is a whole.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel()
    mesh, (rows, *rest) = tensor.device_mesh, tensor.shape
    first = min(rows, -(-rows // mesh.size()) * mesh.get_local_rank())
    return first * prod(rest), tensor.to_local().numel()


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
