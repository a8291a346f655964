"""The tensors of a model: the parameters that one optimizer exchanges, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import Communicator


class ModelTensors:
    """Names every tensor of a model, for ranks and checkpoints.

    Args:
        model: The model. None if only parameters were named; then there are no buffers.
        buckets: Buckets of the exchanged parameters.
    """

    def __init__(self, model: torch.nn.Module | None, buckets: Sequence[Bucket]) -> None:
        self._model = model
        self._buckets = buckets
        self.exchanged = {parameter for bucket in buckets for parameter in bucket.parameters}

    def trained(self) -> dict[str, torch.Tensor]:
        """Returns all exchanged parameters by name."""
        return {name: one for bucket in self._buckets for name, one in bucket.named_parameters}

    def rest(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the model's buffers and frozen parameters, which are not exchanged."""
        if self._model is None:
            return []
        frozen = [(name, one) for name, one in self._model.named_parameters() if one not in self.exchanged]
        return [*self._model.named_buffers(), *frozen]

    def state(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the model by name, to read and to overwrite."""
        return {name: tensor.detach() for name, tensor in [*self.trained().items(), *self.rest()]}


def check_model(model: object) -> None:
    """Checks that `model` is a module or None.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(model, torch.nn.Module | None):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module: call"
            " DistributedOptimizer(optimizer, model); for parameters of several models call"
            " DistributedOptimizer(optimizer, named_parameters=...)"
        )


def check_batch_norm(model: torch.nn.Module | None, communicator: Communicator) -> None:
    """Checks that no layer believes that it synchronizes over ranks and does not.

    torch's SyncBatchNorm uses torch.distributed. Without a process group it is an ordinary BatchNorm,
    silently.

    Raises:
        ConfigError: The model has such a layer.
    """
    if model is None or communicator.size == 1 or torch.distributed.is_initialized():
        return
    for name, module in model.named_modules():
        if type(module) is torch.nn.SyncBatchNorm:
            raise ConfigError(
                f"{name or 'the model'} is a torch.nn.SyncBatchNorm, which would not synchronize: it needs"
                " torch.distributed. Use hubring.horovod.SyncBatchNorm, which uses Hubring's collectives, or"
                " torch.nn.BatchNorm"
            )
