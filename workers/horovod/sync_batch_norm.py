"""Batch normalization over the batches of all ranks.

The statistics of a step cover the samples of all ranks, weighted by the number of samples on each rank (the
parallel variance of Chan et al., 1979). Gradients flow through the statistics to all ranks. The
implementation uses torch's own operations, so it runs on the input's device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from hubring.workers.horovod.basics import size
from hubring.workers.horovod.collectives.allreduce import allreduce_async
from hubring.workers.horovod.collectives.moving import allgather_async
from hubring.workers.horovod.collectives.operation import Sum, synchronize

Tensor = torch.Tensor


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` for inputs with any number of dimensions; trains with all ranks' statistics.

    Args:
        num_features: Number of channels, the input's second dimension.
        eps: Added to the variance.
        momentum: Weight of a step's statistics in the running statistics; None: a plain average.
        affine: Whether to learn weight and bias.
        track_running_stats: Whether to track running statistics for evaluation.
        device: Where the parameters are.
        dtype: The parameters' dtype.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalizes a batch of shape (N, C, ...).

        Raises:
            ValueError: The batch has fewer than two dimensions.
            HorovodInternalError: Ranks disagree, or a rank is lost.
        """
        self._check_input_dim(input)
        if not self.training and not self.track_running_stats and size() == 1:
            # torch would take running statistics that were kept before they were turned off.
            return batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if size() == 1 or (self.track_running_stats and not self.training):
            return super().forward(input)
        result, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, variance * (count / (count - 1).clamp(min=1)))
        return result

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    """Also returns mean, variance and number of samples, for the running statistics."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        mean, variance, count = _statistics(batch)
        scale = torch.rsqrt(variance + eps)
        normal = (batch - _across(mean, batch)) * _across(scale, batch)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        result = normal if weight is None else normal * _across(weight, batch)
        return (
            (result if bias is None else result + _across(bias, batch)).to(batch.dtype),
            mean,
            variance,
            count,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normal, weight, scale, count = ctx.saved_tensors
        gradient = gradients[0]
        to_bias, to_weight = gradient.sum(_rest(gradient)), (gradient * normal).sum(_rest(gradient))
        flow = gradient if weight is None else gradient * _across(weight, gradient)
        # Each statistic's gradient sums over the samples of all ranks, and spreads evenly over all samples.
        sums = torch.stack([flow.sum(_rest(flow)), (flow * normal).sum(_rest(flow))])
        shares = synchronize(allreduce_async(sums, op=Sum)) / count
        inner = flow - _across(shares[0], flow) - normal * _across(shares[1], flow)
        affine = (None, None) if weight is None else (to_weight.to(weight.dtype), to_bias.to(weight.dtype))
        return (inner * _across(scale, flow)).to(gradient.dtype), *affine, None


def _statistics(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean and biased variance of each channel over all ranks, and the values per channel."""
    here = batch.detach().float() if batch.dtype in (torch.float16, torch.bfloat16) else batch.detach()
    count = here.new_full((1,), here.numel() // max(1, here.shape[1]))
    if here.numel():
        variance, mean = torch.var_mean(here, _rest(here), correction=0)
    else:  # a rank without samples still takes part
        mean = variance = here.new_zeros(here.shape[1])
    rows = synchronize(allgather_async(torch.cat([mean, variance, count])[None]))
    means, variances, counts = rows.split([len(mean), len(mean), 1], dim=1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    return mean, (counts * (variances + (means - mean) ** 2)).sum(0) / total, total


def _rest(batch: Tensor) -> list[int]:
    return [dimension for dimension in range(batch.dim()) if dimension != 1]


def _across(channels: Tensor, batch: Tensor) -> Tensor:
    """Reshapes one value per channel so that it broadcasts over the batch."""
    return channels.view(1, -1, *[1] * (batch.dim() - 2))
