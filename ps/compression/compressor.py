"""Gradient compression, for the hub and the ring: the codec for a name, and means of what it has encoded.

`ErrorFeedback` compensates for what a biased codec omits.

PowerSGD is not a Compressor: it needs a matrix and two rounds of means. It is in
`hubring.workers.communicators.powersgd`. A shard treats its factors as plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import isfinite

import torch
from torch import Tensor

from hubring.ps.compression.codecs import Compressor, Half, Int8, Sign, TopK
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded
from hubring.ps.core.optimizer_state import RESIDUAL, OptimizerState
from hubring.ps.core.types import parse_codec


@lru_cache(maxsize=64)
def by_name(name: str) -> Compressor:
    """Returns the Compressor for a name such as `bf16`, `int8` or `topk:0.01`.

    Raises:
        ConfigError: There is none with that name.
    """
    kind, argument = parse_codec(name)
    match kind:
        case "bf16":
            return Half(name, torch.bfloat16)
        case "fp16":
            return Half(name, torch.float16)
        case "int8":
            return Int8()
        case "sign":
            return Sign()
        case "topk":
            return TopK(argument)
    raise ConfigError(f"compression {name!r} takes matrices, not flat tensors; only workers can apply it")


def codec_for(name: str, numel: int, dtype: torch.dtype) -> Compressor | None:
    """Returns the codec for a flat tensor in a job that compresses with `name`, or None to send it as it is.

    A tensor that would not get shorter is sent as it is. So is every tensor if `name` is empty or
    `powersgd`, whose factors are small already. Worker and shard call this function with the same
    arguments, so they agree.
    """
    if not name or name.startswith("powersgd:"):
        return None
    codec = by_name(name)
    return codec if codec.nbytes(numel) < numel * dtype.itemsize else None


def mean_into(
    out: Tensor, codec: Compressor, contributions: Sequence[Coded], scratch: Tensor, count: int | None = None
) -> None:
    """Writes the mean of encoded gradients to `out`. Decodes and sums them in the order given.

    Args:
        out: Has the gradients' length, and their dtype or a wider one.
        codec: The codec of all gradients.
        contributions: Payloads that passed `check`.
        scratch: At least as long as `out`, with its dtype.
        count: The number of gradients, if some contributions are sums.
    """
    count = count or len(contributions)
    codec.decode(contributions[0].payload, out)
    one = scratch[: out.numel()]
    for contribution in contributions[1:]:
        codec.decode(contribution.payload, one)
        out.add_(one)
    if count > 1:
        out.div_(count)


def weighted_mean_into(
    out: Tensor,
    codec: Compressor | None,
    gradients: Sequence[Tensor | Coded],
    scratch: Tensor,
    weights: Sequence[float | None],
    count: int,
) -> None:
    """Writes the sum of gradients times their weights, divided by the sum of the weights, to `out`.

    See `mean_into` for the arguments. Without a codec, gradients are plain. No weight counts as 1, also for
    each gradient in a sum.
    """
    numbers = [1.0 if weight is None else weight for weight in weights]
    whole = sum(numbers) + count - len(numbers) or 1.0
    out.zero_()
    for gradient, weight in zip(gradients, numbers, strict=True):
        if isinstance(gradient, Coded):
            assert codec is not None, "the store refuses it"
            decoded = scratch[: out.numel()]
            codec.decode(gradient.payload, decoded)
            gradient = decoded
        out.add_(gradient, alpha=weight / whole)


class ErrorFeedback:
    """Encodes one flat tensor per step (Seide et al. 2014; Karimireddy et al. 2019).

    Law: the sum of all sources = the sum of all decoded payloads + the residual, except for
    rounding. So an omission is only delayed: a codec that is inexact in one step is exact over
    many. An unbiased codec has no residual and is used directly.

    A gradient that is not finite resets the residual. Its payload decodes to values that are
    not finite, so every worker skips the step.

    Args:
        codec: The codec.
        numel: Length of the tensor.
        dtype: The gradient's dtype. The residual has the same dtype, or float32 for half precision.
    """

    def __init__(self, codec: Compressor, numel: int, dtype: torch.dtype) -> None:
        self._codec = codec
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        self.residual = torch.zeros(numel if codec.biased else 0, dtype=wide, device="cpu")

    def encode(self, source: Tensor, payload: Tensor, ignored: Iterable[slice] = ()) -> None:
        """Encodes source + residual into `payload` and updates the residual. `source` is not changed.

        Args:
            source: The tensor.
            payload: Receives the code.
            ignored: Elements that no reader of this payload uses; their residual stays as it is.
        """
        if not self._codec.biased:
            self._codec.encode(source, payload)
            return
        kept = [(part, self.residual[part].clone()) for part in ignored]
        due = self.residual.add_(source.to(self.residual.dtype))
        self._codec.encode(due, payload)
        decoded = torch.empty_like(due)
        self._codec.decode(payload, decoded)
        due.sub_(decoded)
        if not isfinite(float(torch.dot(due, due))):
            due.zero_()
        for part, residual in kept:
            due[part] = residual


class CodedMean:
    """A mean gradient for the readers, compressed with the codec of the gradients.

    The next mean adds the codec's error (error feedback). Before the first round
    the mean is the code of zeros. The bytes change only when a round closes, as the
    values do.
    """

    def __init__(self, codec: Compressor, values: Tensor) -> None:
        payload = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8, device="cpu")
        self.latest = Coded(codec.name, payload, values.numel(), values.dtype)
        self._feedback = ErrorFeedback(codec, values.numel(), values.dtype)

    @property
    def residual(self) -> Tensor:
        """What the codec left out of the means so far."""
        return self._feedback.residual

    @property
    def state(self) -> OptimizerState:
        """The residual, in the place of an optimizer's state."""
        return OptimizerState({RESIDUAL: self.residual})

    def encode(self, values: Tensor, absent: Iterable[slice]) -> None:
        """Encodes the mean for the readers, which ignore the elements in `absent`."""
        self._feedback.encode(values, self.latest.payload, absent)
