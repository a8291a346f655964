"""Encodes and decodes one slice."""

from __future__ import annotations

from torch import Tensor

from hubring.ps.compression.compressor import Compressor
from hubring.ps.compression.error_feedback import ErrorFeedback
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded


class SliceCoder:
    """Encodes one slice's gradient, with error feedback, and decodes the mean from the hub.

    Args:
        codec: The job's codec.
        gradient: The slice of the bucket's gradients. It is encoded, and overwritten with the mean.
        payload: A buffer of `codec.nbytes` for the code. The answer may use the same buffer.
    """

    def __init__(self, codec: Compressor, gradient: Tensor, payload: Tensor) -> None:
        self.payload = payload
        self._codec = codec
        self._gradient = gradient
        self._feedback = ErrorFeedback(codec, gradient.numel(), gradient.dtype)

    def encode(self) -> Coded:
        """Encodes the gradient into `payload`. Call it once per step, because it updates the residual."""
        self._feedback.encode(self._gradient, self.payload)
        return Coded(self._codec.name, self.payload, self._gradient.numel(), self._gradient.dtype)

    def decode(self, mean: Coded) -> None:
        """Decodes the mean into the gradient.

        Raises:
            ConfigError: The mean's codec or length differs from the push.
        """
        if (mean.codec, mean.numel) != (self._codec.name, self._gradient.numel()):
            raise ConfigError(
                f"the hub answered with {mean.numel} elements in {mean.codec}, expected"
                f" {self._gradient.numel()} in {self._codec.name}: start the server and all workers with the"
                " same version"
            )
        self._codec.decode(mean.payload, self._gradient)
