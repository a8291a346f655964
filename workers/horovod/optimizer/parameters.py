"""Broadcasts of parameters and optimizer state, for the start of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from hubring.workers.horovod.collectives.broadcast import overwrite_async
from hubring.workers.horovod.collectives.objects import broadcast_object
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.world.world import current


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrites tensors with the root's.

    Args:
        params: `model.state_dict()` or another dict of tensors, `model.named_parameters()`, or a list
            of tensors or of (name, tensor).
        root_rank: The rank whose tensors are used.

    Raises:
        ValueError: `params` is something else, or contains a value that is not a tensor.
        HorovodInternalError: Ranks have different tensors, or a rank is lost.
    """
    handles = [
        overwrite_async(tensor, root_rank, name) for name, tensor in _named(params) if tensor is not None
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copies the root's optimizer state and hyperparameters to all ranks, in place.

    If the root's state is empty, the state is empty on all ranks afterwards: no step is taken to fill it. As
    in Horovod, gradients are then zeros, not None, on each rank whose state was empty.

    Args:
        optimizer: An optimizer of the same parameters on all ranks; wrapped or not.
        root_rank: The rank whose state is used.
        model: The model; its sparse embeddings show which parameters have sparse gradients.

    Raises:
        ValueError: The optimizer is an LBFGS, whose state Horovod cannot broadcast either.
        HorovodInternalError: Ranks have different parameters, or a rank is lost.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state:
        _zero_gradients(optimizer, parameters, model)
    outline = [_outline(optimizer.state.get(parameter, {})) for parameter in parameters]
    groups, outline = broadcast_object((groups, outline), root_rank, "optimizer.outline")
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    if current().rank != root_rank:
        _lay_out(optimizer, parameters, outline)
    broadcast_parameters(list(_tensors(optimizer, parameters)), root_rank)


@dataclass(frozen=True, slots=True)
class _Blank:
    """A tensor without its elements."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def _zero_gradients(optimizer: Optimizer, parameters: list[Any], model: torch.nn.Module | None) -> None:
    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)] if model else []
    sparse = {table.weight for table in tables if table.sparse}
    for parameter in (one for one in parameters if one.requires_grad):
        zeros = torch.zeros_like(parameter)
        is_sparse = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
        parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


def _named(params: Any) -> list[tuple[str | None, torch.Tensor | None]]:
    if isinstance(params, Mapping):
        found = sorted(params.items())
    elif isinstance(params, list | tuple | Iterator):
        found = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; expected a dict or a list of tensors")
    strange = [name for name, value in found if not isinstance(value, torch.Tensor | None)]
    if strange:
        raise ValueError(f"params: {strange[0]!r} is not a tensor; use hvd.broadcast_object for it")
    return found


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one parameter's state, with blanks for tensors."""
    return {
        name: _Blank(value.shape, value.dtype, value.device.type == "cpu")
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def _lay_out(optimizer: Optimizer, parameters: list[Any], outline: list[dict[str, Any]]) -> None:
    """Gives the state the structure of the root's state, and reuses the tensors that fit."""
    for parameter, wanted in zip(parameters, outline, strict=True):
        here = optimizer.state.pop(parameter, {})
        if wanted:
            optimizer.state[parameter] = {
                name: _fitting(here.get(name), value, parameter) if isinstance(value, _Blank) else value
                for name, value in wanted.items()
            }


def _fitting(tensor: Any, blank: _Blank, parameter: torch.Tensor) -> torch.Tensor:
    device = "cpu" if blank.on_cpu else parameter.device
    if isinstance(tensor, torch.Tensor) and (tensor.shape, tensor.dtype) == (blank.shape, blank.dtype):
        return tensor.to(device)
    return torch.empty(blank.shape, dtype=blank.dtype, device=device)


def _tensors(optimizer: Optimizer, parameters: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, parameter in enumerate(parameters):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optimizer.{index}.{name}", value
