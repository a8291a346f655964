"""One slice's way to the hub and back in a codec."""

from __future__ import annotations

from torch import Tensor

from hubring.ps.compression.compressor import Compressor
from hubring.ps.compression.error_feedback import ErrorFeedback
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded


class SliceCoder:
    """Encodes one slice's gradient, with error feedback, and decodes the mean that comes back.

    Args:
        codec: The job's.
        gradient: The slice of the bucket's gradients: what is encoded, and where means are decoded to.
        payload: What travels, `codec.nbytes` long; answers may land in it, as it is free by then.
    """

    def __init__(self, codec: Compressor, gradient: Tensor, payload: Tensor) -> None:
        self.payload = payload
        self._codec = codec
        self._gradient = gradient
        self._feedback = ErrorFeedback(codec, gradient.numel(), gradient.dtype)

    def encode(self) -> Coded:
        """The gradient's code, in `payload`; to be called once a step, for what is sent counts as given."""
        self._feedback.encode(self._gradient, self.payload)
        return Coded(self._codec.name, self.payload, self._gradient.numel(), self._gradient.dtype)

    def decode(self, mean: Coded) -> None:
        """Makes the gradient the mean.

        Raises:
            ConfigError: It is in another codec, or of another length, than was pushed.
        """
        if (mean.codec, mean.numel) != (self._codec.name, self._gradient.numel()):
            raise ConfigError(
                f"the hub answered with {mean.numel} elements in {mean.codec}, where {self._gradient.numel()}"
                f" in {self._codec.name} were due: start the server and all workers from the same version"
            )
        self._codec.decode(mean.payload, self._gradient)
