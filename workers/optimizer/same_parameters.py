"""Checks now and then that all ranks still have the same parameters, where each worker steps.

The ranks start with the same values and step with the same means, so they stay alike, bit by bit. A script
that changes parameters on one rank only, or differently on each, parts them: every rank then trains a model
of its own, and the loss may not show it. `Embedding(max_norm=...)` does so in forward, with the rows of a
rank's own batch.

Ranks on unlike processors may round differently. That is logged, and is no error while the ranks agree in
half of the digits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.value_memory import BITS
from hubring.workers.collectives import allgather, broadcast
from hubring.workers.collectives.extremes import extremes
from hubring.workers.communicators.base import Communicator

log = logging.getLogger(__name__)

EVERY = 1024
"""Steps between two checks, after the first ones. A check reads all parameters once."""


def due(step: int) -> bool:
    """Whether to check after this step: after 1, 2, 4, 8... steps, and later after every `EVERY` steps."""
    return step % EVERY == 0 or step.bit_count() == 1


def check_same_parameters(parameters: Mapping[str, Tensor], communicator: Communicator) -> None:
    """Compares the ranks' parameters; all ranks call it after the same step.

    Args:
        parameters: The trained parameters by name, in the same order on all ranks.
        communicator: Connects the ranks.

    Raises:
        ConfigError: Two ranks differ by more than rounding.
    """
    with torch.no_grad():
        digests = torch.stack([_digest(one).cpu() for one in parameters.values()]).tolist()
        least, most = extremes(digests, "parameters", communicator)
        # All ranks go on with the same parameters, since they have the same extremes.
        differing = [name for name, low, high in zip(parameters, least, most, strict=True) if low != high]
        for name in differing:
            _check_alike(name, parameters[name], communicator)
    if differing:
        log.warning(
            "the ranks' values of %s differ by rounding, so that each rank trains a slightly different model:"
            " use processors of one kind, or let the hub step (without --aggregate)",
            differing[0],
        )


def _check_alike(name: str, tensor: Tensor, communicator: Communicator) -> None:
    """Raises ConfigError if ranks have another value of a parameter than rank 0, by more than rounding."""
    own = tensor.detach().cpu().double()
    first = broadcast(own, 0, f"parameter {name}", communicator=communicator)
    largest = first.abs().max().clamp_min(torch.finfo(tensor.dtype).tiny)
    distance = (own - first).abs().max() / largest
    here = torch.tensor([communicator.rank, distance.item()], dtype=torch.float64)
    limit = torch.finfo(tensor.dtype).eps ** 0.5
    pairs = allgather(here, f"parameter {name}", communicator=communicator).view(-1, 2).tolist()
    others = [int(rank) for rank, far in pairs if not far <= limit]  # a NaN differs too
    if others:
        raise ConfigError(
            f"{_ranks(others)} and rank 0 have different values of parameter {name}, so each would train a"
            " model of its own: make the same changes to parameters on all ranks (Embedding(max_norm=...)"
            " makes other changes on each), for example by computing them from hubring.allreduce or"
            " hubring.broadcast"
        )


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
