"""The tensors of a model: the parameters that one optimizer exchanges, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucketing import Bucket


class ModelTensors:
    """Names every tensor of a model, for ranks and checkpoints.

    Args:
        model: The model. None if only parameters were named; then there are no buffers.
        buckets: Buckets of the exchanged parameters.
        held: All parameters of the optimizer's groups.
    """

    def __init__(
        self, model: torch.nn.Module | None, buckets: Sequence[Bucket], held: Sequence[torch.nn.Parameter]
    ) -> None:
        self._model = model
        self._buckets = buckets
        self.exchanged = {parameter for bucket in buckets for parameter in bucket.parameters}
        self._frozen = [one for one in held if one not in self.exchanged and one.numel() > 0]

    def trained(self) -> dict[str, torch.Tensor]:
        """Returns all exchanged parameters by name."""
        return {
            tensor.name: parameter
            for bucket in self._buckets
            for tensor, parameter in zip(bucket.spec.tensors, bucket.parameters, strict=True)
        }

    def rest(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the model's buffers and frozen parameters, which are not exchanged."""
        if self._model is None:
            return []
        frozen = [(name, one) for name, one in self._model.named_parameters() if one not in self.exchanged]
        return [*self._model.named_buffers(), *frozen]

    def state(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the model by name, to read and to overwrite."""
        return {name: tensor.detach() for name, tensor in [*self.trained().items(), *self.rest()]}

    def check_frozen(self) -> None:
        """Checks that no parameter outside the buckets has a gradient.

        Raises:
            ConfigError: A parameter was frozen when the optimizer was made and has a gradient now.
        """
        thawed = [parameter for parameter in self._frozen if parameter.grad is not None]
        if thawed:
            raise ConfigError(
                f"{len(thawed)} parameter(s), the first of shape {tuple(thawed[0].shape)}, were frozen when"
                " DistributedOptimizer was made and have gradients now, which are not exchanged: make"
                " DistributedOptimizer while the parameters are trainable, and freeze them afterwards"
            )


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
