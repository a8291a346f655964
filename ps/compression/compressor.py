"""Compression of gradients on the wire: one seam for hub and ring.

A Compressor turns a flat tensor into bytes whose number depends on the number
of elements alone, and bytes back into a tensor. It holds no state, so one serves
all threads. What a biased one leaves out is made up for by `hubring.ps.compression.error_feedback`.

PowerSGD is no Compressor: it needs a matrix, and two rounds of means. It lives
with the workers (`hubring.workers.communicators.powersgd`); to a shard its factors are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from hubring.ps.compression.quantization import Half, Int8, Sign
from hubring.ps.compression.sparsification import TopK
from hubring.ps.core.codecs import parse
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Coded


class Compressor(Protocol):
    """How gradients look on the wire. Sources are flat CPU tensors of any floating dtype."""

    @property
    def name(self) -> str:
        """As `by_name` takes it."""

    @property
    def biased(self) -> bool:
        """What it leaves out must be given with the next gradient, or the training may not converge."""

    def nbytes(self, numel: int) -> int:
        """Length of the payload for so many elements."""

    def check(self, payload: Tensor, numel: int) -> None:
        """Refuses a payload that `decode` could not read into `numel` elements.

        Raises:
            ConfigError: Says what is wrong, and the mend.
        """

    def encode(self, source: Tensor, payload: Tensor) -> None:
        """Writes `source` into `payload`, which is flat uint8, `nbytes` long and aligned to four bytes."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Overwrites `out`, flat and of any floating dtype, with what a checked payload says."""


@lru_cache(maxsize=64)
def by_name(name: str) -> Compressor:
    """The Compressor of a name such as `bf16`, `int8` or `topk:0.01`.

    Raises:
        ConfigError: There is none of that name.
    """
    kind, argument = parse(name)
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
    raise ConfigError(f"compression {name!r} takes matrices, not flat tensors: it is for the workers to do")


def codec_for(name: str, numel: int, dtype: torch.dtype) -> Compressor | None:
    """What a flat tensor of a job that compresses by `name` travels in; None: as it is.

    So does a tensor that would not get shorter, and everything where `name` is
    empty, or `powersgd`, whose factors are small already. Worker and shard ask
    the same question, so they agree.
    """
    if not name or name.startswith("powersgd:"):
        return None
    codec = by_name(name)
    return codec if codec.nbytes(numel) < numel * dtype.itemsize else None


def mean_into(out: Tensor, codec: Compressor, contributions: Sequence[Coded], scratch: Tensor) -> None:
    """Writes the mean of coded gradients to `out`, decoded and summed in the order given.

    Args:
        out: Of the gradients' length and dtype.
        codec: Of all of them.
        contributions: Checked ones.
        scratch: At least as long as `out`, and of its dtype.
    """
    codec.decode(contributions[0].payload, out)
    one = scratch[: out.numel()]
    for contribution in contributions[1:]:
        codec.decode(contribution.payload, one)
        out.add_(one)
    if len(contributions) > 1:
        out.div_(len(contributions))
