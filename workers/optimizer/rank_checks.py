"""Checks that the ranks train one model: at the start, at the first step, and now and then.

The ranks start with the same values and step with the same means, so they stay alike, bit by bit. A script
that changes parameters on one rank only, or differently on each, parts them: every rank then trains a model
of its own, and the loss may not show it. `Embedding(max_norm=...)` does so in forward, with the rows of a
rank's own batch. Ranks on unlike processors may round differently. That is logged, and is no error while the
ranks agree in half of the digits.

The ranks' first batches show the most common mistakes. Without a sharded sampler all ranks train on the same
samples: nothing fails, and more ranks gain nothing. Batches of different sizes make the mean over ranks
another mean than that over samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.torch_internals import is_functorch_tensor, is_traced
from hubring.ps.optim.hyperparameters import as_number
from hubring.workers.buckets.value_memory import BITS
from hubring.workers.collectives import allgather, broadcast
from hubring.workers.collectives.agreement import extremes, first_difference, plain_copy, start_extremes
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.forward import ModuleHook

log = logging.getLogger(__name__)

EVERY = 1024
"""Steps between two checks of the parameters, after the first ones. A check reads all parameters once."""

_UNSEEN = -1


# At the start.


def check_same_state(optimizer: Optimizer, communicator: Communicator) -> None:
    """Compares the ranks' state, which a script may have loaded before `DistributedOptimizer`.

    Only tensors and numbers count: other objects need not look the same on all ranks.

    Raises:
        ConfigError: Two ranks differ. Each would step on its own. The error names the first difference.
    """
    if communicator.size == 1:
        return
    lines = list(_lines("state", optimizer.state_dict()["state"]))
    found = first_difference(lines, communicator, "optimizer state")
    if found is not None:
        raise ConfigError(
            f"the optimizers of rank 0 and rank {found.rank} have different state: rank 0 has"
            f" {found.rank_0_has or 'none'}, rank {found.rank} has {found.rank_has or 'none'}; load the same"
            " checkpoint on all ranks before DistributedOptimizer(...), or load it on none"
        )


def _lines(name: str, value: Any) -> Iterator[str]:
    """Returns a line for each tensor and number, as `state[0][exp_avg] float32[4, 4] checksum 1b2c3d4e`."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        yield f"{name} {kind} checksum {crc32(content):08x}"
    elif (number := as_number(value)) is not None:
        yield f"{name} {number!r}"
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _lines(f"{name}[{key}]", one)
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _lines(f"{name}[{place}]", one)


# At the first step.


class FirstBatch:
    """Notes the input of a model's first forward, and compares it once.

    Args:
        model: The model.
        communicator: Connects the ranks, which must be in lockstep.
    """

    def __init__(self, model: torch.nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._rows = self._digest = _UNSEEN
        self._hook = model.register_forward_pre_hook(ModuleHook(self._note), with_kwargs=True)

    def compare(self, *, weighted: bool) -> None:
        """Warns on rank 0 if the batches are the same, or of different sizes and not `weighted`.

        All ranks must call it. It waits for no other rank: one that joins a running job never calls it.
        """
        self._hook.remove()
        rank, own = self._communicator.rank, [self._rows, self._digest]

        def warn(least: list[int], most: list[int]) -> None:
            if not rank:
                _warn(least, most, weighted=weighted)

        start_extremes(own, "first batch", self._communicator, warn)

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or self._rows != _UNSEEN:
            return
        if is_traced():
            return
        batch = next(_tensors([*args, *kwargs.values()]), None)
        if batch is not None and batch.dim() and not is_functorch_tensor(batch):
            self._rows = batch.shape[0]
            sample = batch.detach().reshape(-1)[:4096].cpu().contiguous()
            self._digest = crc32(sample.view(torch.uint8).numpy().tobytes())


def first_batch_of(model: torch.nn.Module | None, communicator: Communicator) -> FirstBatch | None:
    """Returns what compares the first batches.

    None if there are no ranks in lockstep to compare with, or the model takes no hooks, as of TorchScript.
    """
    compares = communicator.size > 1 and communicator.lockstep and not communicator.late
    if model is None or isinstance(model, torch.jit.ScriptModule) or not compares:
        return None
    return FirstBatch(model, communicator)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _warn(least: list[int], most: list[int], *, weighted: bool) -> None:
    (smallest, first), (largest, last) = least, most
    if smallest == _UNSEEN:
        return
    if smallest != largest and not weighted:
        log.warning(
            "the ranks' first batches have %d to %d rows, and all ranks count equally: set optimizer.weight"
            " to each rank's rows before backward, or use batches of one size",
            smallest,
            largest,
        )
    elif first == last:
        log.warning(
            "all ranks trained on the same first batch: give each rank its own samples, with"
            " hubring.ShardedSampler(dataset) as the DataLoader's sampler"
        )


# Now and then.


def due(step: int) -> bool:
    """Whether to check after this step: after 1, 2, 4, 8... steps, and later after every `EVERY` steps."""
    return step % EVERY == 0 or step.bit_count() == 1


def check_same_parameters(
    parameters: Mapping[str, Tensor], communicator: Communicator, optimizer: Optimizer | None = None
) -> None:
    """Compares the ranks' parameters; all ranks call it after the same step.

    Args:
        parameters: The trained parameters by name, in the same order on all ranks.
        communicator: Connects the ranks.
        optimizer: What steps them. If the ranks differ, it may show why.

    Raises:
        ConfigError: Two ranks differ by more than rounding.
    """
    with torch.no_grad():
        digests = torch.stack([_digest(_real(one)).cpu() for one in parameters.values()]).tolist()
        least, most = extremes(digests, "parameters", communicator)
        # All ranks go on with the same parameters, since they have the same extremes.
        differing = [name for name, low, high in zip(parameters, least, most, strict=True) if low != high]
        for name in differing:
            _check_alike(name, parameters[name], communicator, optimizer)
    if differing:
        log.warning(
            "the ranks' values of %s differ by rounding, so that each rank trains a slightly different model:"
            " use processors of one kind, or let the hub step (without --aggregate)",
            differing[0],
        )


def _check_alike(name: str, tensor: Tensor, communicator: Communicator, optimizer: Optimizer | None) -> None:
    """Raises ConfigError if ranks have another value of a parameter than rank 0, by more than rounding."""
    own = _real(tensor).cpu().double()
    first = broadcast(own, 0, f"parameter {name}", communicator=communicator)
    largest = first.abs().max().clamp_min(torch.finfo(tensor.dtype).tiny)
    distance = (own - first).abs().max() / largest
    here = torch.tensor([communicator.rank, distance.item()], dtype=torch.float64, device="cpu")
    limit = torch.finfo(tensor.dtype).eps ** 0.5
    pairs = allgather(here, f"parameter {name}", communicator=communicator).view(-1, 2).tolist()
    others = [int(rank) for rank, far in pairs if not far <= limit]  # a NaN differs too
    if others:
        raise ConfigError(
            f"{_ranks(others)} and rank 0 have different values of parameter {name}, so each would train a"
            f" model of its own: {_why_apart(name, tensor, communicator, optimizer)}"
        )


def _why_apart(name: str, tensor: Tensor, communicator: Communicator, optimizer: Optimizer | None) -> str:
    """Returns why the ranks' values may differ, and what to write; all ranks call it."""
    options = [] if optimizer is None else [_options_of(group) for group in optimizer.param_groups]
    found = first_difference(list(_lines("param_groups", options)), communicator, "hyperparameters")
    if found is not None:
        return (
            f"rank 0 has {found.rank_0_has or 'no such group'}, and rank {found.rank} has"
            f" {found.rank_has or 'no such group'}; set the same hyperparameters on all ranks, and average a"
            " scheduler's metric with hubring.allreduce first"
        )
    gradient = None if tensor.grad is None else plain_copy(tensor.grad)
    if first_difference(list(_lines("gradient", gradient)), communicator, "gradients") is not None:
        return (
            f"the mean gradient of {name} was the same on all ranks, and a script or an optimizer has changed"
            " it: make the same changes to gradients on all ranks, for example by numbers from"
            " hubring.allreduce"
        )
    return (
        "make the same changes to parameters, gradients, hyperparameters and optimizer state on all ranks,"
        " for example by computing them from hubring.allreduce or hubring.broadcast (Embedding(max_norm=...)"
        " changes other rows on each rank)"
    )


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in group.items() if option != "params"}


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _digest(tensor: Tensor) -> Tensor:
    """Returns an int64 of 62 bits that depends on all bits of a tensor and on the order of its rows."""
    bits = tensor.detach().view(BITS[tensor.element_size()])
    if bits.dim() > 1:
        bits = bits.sum(tuple(range(1, bits.dim())), dtype=torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return (bits.reshape(-1) * places).sum(dtype=torch.int64) & (1 << 62) - 1


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
