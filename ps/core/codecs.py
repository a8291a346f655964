"""The names of what gradients can be compressed with.

What some take stands after a colon:

    bf16, fp16       two bytes an element
    int8             one byte an element, and a scale for every block
    sign             one bit an element, and a magnitude for every block
    topk:0.01        the largest hundredth of the elements, and where they stood
    powersgd:4       two factors of rank 4 in place of every matrix

Names alone, without torch: settings are checked by them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hubring.ps.core.errors import ConfigError

PLAIN = ("bf16", "fp16", "int8", "sign")
"""Codecs that take no argument."""

MAX_RANK = 256
"""Of PowerSGD's factors: beyond it they are no smaller than most matrices."""

_KNOWN = f"{', '.join(PLAIN)}, topk:FRACTION as in topk:0.01, powersgd:RANK as in powersgd:4"
_PATTERN = re.compile(r"(?P<kind>topk|powersgd):(?P<argument>[0-9]{1,12}|[0-9]{0,3}\.[0-9]{1,12})")


class CodecSpec(NamedTuple):
    """A codec's kind and its argument: a fraction for `topk`, a rank for `powersgd`, else 0."""

    kind: str
    argument: float = 0.0


def parse(text: str) -> CodecSpec:
    """Reads a codec's name.

    Raises:
        ConfigError: There is no such codec, or its argument is out of range; names what there is.
    """
    if text in PLAIN:
        return CodecSpec(text)
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"compression {text!r}: there is no such codec; use one of {_KNOWN}")
    kind, argument = match["kind"], float(match["argument"])
    if kind == "topk" and not 0 < argument < 1:
        raise ConfigError(
            f"compression {text!r}: topk takes the fraction of elements that travels, above 0 and below 1;"
            " topk:0.01 is usual"
        )
    if kind == "powersgd" and not (argument.is_integer() and 1 <= argument <= MAX_RANK):
        raise ConfigError(
            f"compression {text!r}: powersgd takes the factors' rank, a whole number from 1 to {MAX_RANK};"
            " powersgd:4 is usual"
        )
    return CodecSpec(kind, argument)
