"""The tensors of a model that one optimizer trains: what is exchanged, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucketing import Bucket


class ModelTensors:
    """Names every tensor of a model, as ranks and checkpoints need them.

    Args:
        model: Has buffers and frozen parameters too; None where only parameters were named.
        buckets: Where the exchanged parameters lie.
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
        """Every exchanged parameter by name."""
        return {
            tensor.name: parameter
            for bucket in self._buckets
            for tensor, parameter in zip(bucket.spec.tensors, bucket.parameters, strict=True)
        }

    def rest(self) -> list[tuple[str, torch.Tensor]]:
        """The model's buffers and frozen parameters, which are not exchanged."""
        if self._model is None:
            return []
        frozen = [(name, one) for name, one in self._model.named_parameters() if one not in self.exchanged]
        return [*self._model.named_buffers(), *frozen]

    def state(self) -> dict[str, torch.Tensor]:
        """All of these by name, to read and to overwrite."""
        return {name: tensor.detach() for name, tensor in [*self.trained().items(), *self.rest()]}

    def check_frozen(self) -> None:
        """Checks that no parameter got a gradient which is not exchanged.

        Raises:
            ConfigError: One did: it was frozen when the optimizer was made.
        """
        thawed = [parameter for parameter in self._frozen if parameter.grad is not None]
        if thawed:
            raise ConfigError(
                f"{len(thawed)} parameter(s), the first of shape {tuple(thawed[0].shape)}, were frozen when"
                " DistributedOptimizer was made and have gradients now, which it does not exchange: make it"
                " while they are trainable, and freeze them afterwards"
            )


def check_model(model: object) -> None:
    """Checks that a caller gave a module, or none.

    Raises:
        ConfigError: It gave something else.
    """
    if not isinstance(model, torch.nn.Module | None):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module: call"
            " DistributedOptimizer(optimizer, model), or name parameters of more than one model by"
            " DistributedOptimizer(optimizer, named_parameters=...)"
        )
