"""Error feedback: adds what a codec omits from one gradient to the next gradient."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import torch
from torch import Tensor

from hubring.ps.compression.compressor import Compressor


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
        self.residual = torch.zeros(numel if codec.biased else 0, dtype=wide)

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
        due.sub_(self._decoded(payload))
        if not isfinite(float(torch.dot(due, due))):
            due.zero_()
        for part, residual in kept:
            due[part] = residual

    def _decoded(self, payload: Tensor) -> Tensor:
        decoded = torch.empty_like(self.residual)
        self._codec.decode(payload, decoded)
        return decoded
