"""Compares the ranks' first batches, since the most common mistakes show there.

Without a sharded sampler all ranks train on the same samples: nothing fails, and more ranks gain nothing.
Batches of different sizes make the mean over ranks another mean than that over samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from hubring.workers.collectives.extremes import start_extremes
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.module_hook import ModuleHook

log = logging.getLogger(__name__)

_UNSEEN = -1


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

    def compare(self) -> None:
        """Warns on rank 0 if the batches are the same or of different sizes. All ranks must call it.

        It waits for no other rank: one that joins a running job never calls it.
        """
        self._hook.remove()
        rank, own = self._communicator.rank, [self._rows, self._digest]
        start_extremes(own, "first batch", self._communicator, lambda *both: None if rank else _warn(*both))

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or self._rows != _UNSEEN:
            return
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        batch = next(_tensors([*args, *kwargs.values()]), None)
        if batch is not None and batch.dim() and not is_functorch_wrapped_tensor(batch):
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


def _warn(least: list[int], most: list[int]) -> None:
    (smallest, first), (largest, last) = least, most
    if smallest == _UNSEEN:
        return
    if smallest != largest:
        log.warning(
            "the ranks' first batches have %d to %d rows, and all ranks have the same weight: multiply"
            " each"
            " rank's mean loss by its rows * size / all rows, or use batches of one size",
            smallest,
            largest,
        )
    elif first == last:
        log.warning(
            "all ranks trained on the same first batch: give each rank its own samples, with"
            " hubring.ShardedSampler(dataset) as the DataLoader's sampler"
        )
