"""Error feedback: what a codec left out of one gradient goes with the next."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from hubring.ps.compression.compressor import Compressor


class ErrorFeedback:
    """Encodes one flat tensor step by step (Seide et al. 2014; Karimireddy et al. 2019).

    Law: what was given so far = what the payloads so far decode to + the residual,
    but for rounding. So nothing is lost, only late, and a codec that is merely
    roughly right in one step is right over many. A codec that is not biased has
    no residual, and is used as it is.

    A gradient that is not finite leaves no residual behind: the payload says so,
    and the step is everybody's to skip.

    Args:
        codec: What encodes.
        numel: Length of the tensor.
        dtype: The residual's; of half-precision gradients it is float32.
    """

    def __init__(self, codec: Compressor, numel: int, dtype: torch.dtype) -> None:
        self._codec = codec
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        self.residual = torch.zeros(numel if codec.biased else 0, dtype=wide)

    def encode(self, source: Tensor, payload: Tensor) -> None:
        """Writes source + residual into `payload` and keeps what did not fit; `source` is only read."""
        if not self._codec.biased:
            self._codec.encode(source, payload)
            return
        due = self.residual.add_(source.to(self.residual.dtype))
        self._codec.encode(due, payload)
        due.sub_(self._decoded(payload))
        if not isfinite(float(torch.dot(due, due))):
            due.zero_()

    def _decoded(self, payload: Tensor) -> Tensor:
        decoded = torch.empty_like(self.residual)
        self._codec.decode(payload, decoded)
        return decoded
