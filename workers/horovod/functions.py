"""The names of `horovod.torch.functions`: broadcasts of parameters, optimizer state and objects.

Security: a process that sends a pickle can run code in the process that loads it. The functions for
objects load pickles from the other ranks of the same job, which run the same script. So ranks trust each
other, as in Horovod. Besides `horovod.run`, no other code in this project loads a pickle. cloudpickle
also accepts lambdas and classes that the script itself defines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch.optim import Optimizer

from hubring.workers.horovod.collectives.moving import allgather_async, broadcast_, overwrite_async
from hubring.workers.horovod.collectives.operation import synchronize
from hubring.workers.horovod.world import ProcessSet, checked, current, global_process_set


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies the root's object to every rank. The ranks must trust each other; see the module's docstring.

    Args:
        obj: Any object that cloudpickle can pickle; only the root's object is used.
        root_rank: A rank of the whole job, even with a process set.
        name: Matches the operation across ranks.
        process_set: The ranks that take part.

    Returns:
        `obj` itself on the root, a copy of the root's object elsewhere.

    Raises:
        ValueError: The root or this rank is not a member of the set.
        HorovodInternalError: A rank is lost.
    """
    name = name or "broadcast_object"
    is_root = current().rank == root_rank
    written = _written(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = broadcast_(
        torch.tensor([written.numel()], device="cpu"), root_rank, f"{name}.length", process_set
    )
    if not is_root:
        written = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    broadcast_(written, root_rank, f"{name}.pickle", process_set)
    return obj if is_root else _read(written)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in rank order. Otherwise like `broadcast_object`."""
    name, members, written = name or "allgather_object", checked(process_set), _written(obj)
    lengths = allgather_async(torch.tensor([written.numel()], device="cpu"), f"{name}.length", members)
    pickles = allgather_async(written, f"{name}.pickle", members)
    sizes = synchronize(lengths).tolist()
    return [_read(one) for one in synchronize(pickles).split(sizes)]


def _written(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _read(written: torch.Tensor) -> Any:
    return cloudpickle.loads(written.numpy().tobytes())


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


__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
