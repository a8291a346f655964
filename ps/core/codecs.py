"""The names of gradient codecs.

A codec's argument follows a colon:

    bf16, fp16       two bytes per element
    int8             one byte per element, and a scale per block
    sign             one bit per element, and a magnitude per block
    topk:0.01        the largest 1 % of the elements, and their indices
    powersgd:4       two factors of rank 4 for each matrix

This module does not import torch, so that settings can be checked without it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hubring.ps.core.errors import ConfigError

PLAIN = ("bf16", "fp16", "int8", "sign")
"""Codecs without an argument."""

MAX_RANK = 256
"""Highest rank of PowerSGD factors. Above it the factors are no smaller than most matrices."""

_KNOWN = f"{', '.join(PLAIN)}, topk:FRACTION as in topk:0.01, powersgd:RANK as in powersgd:4"
_PATTERN = re.compile(r"(?P<kind>topk|powersgd):(?P<argument>[0-9]{1,12}|[0-9]{0,3}\.[0-9]{1,12})")


class CodecSpec(NamedTuple):
    """A codec's kind and argument: a fraction for `topk`, a rank for `powersgd`, otherwise 0."""

    kind: str
    argument: float = 0.0


def parse(text: str) -> CodecSpec:
    """Parses a codec's name.

    Raises:
        ConfigError: The codec is unknown, or its argument is out of range. Names the valid values.
    """
    if text in PLAIN:
        return CodecSpec(text)
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"compression {text!r}: unknown codec; use one of {_KNOWN}")
    kind, argument = match["kind"], float(match["argument"])
    if kind == "topk" and not 0 < argument < 1:
        raise ConfigError(
            f"compression {text!r}: topk takes the fraction of elements to send, above 0 and below 1;"
            " topk:0.01 is typical"
        )
    if kind == "powersgd" and not (argument.is_integer() and 1 <= argument <= MAX_RANK):
        raise ConfigError(
            f"compression {text!r}: powersgd takes the factors' rank, a whole number from 1 to {MAX_RANK};"
            " powersgd:4 is typical"
        )
    return CodecSpec(kind, argument)
