from __future__ import annotations

import re

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import CodecSpec, parse_codec


def test_a_name_says_kind_and_argument() -> None:
    for kind in ("bf16", "fp16", "int8", "sign"):
        assert parse_codec(kind) == CodecSpec(kind)
    for kind, argument in (("topk", "0.01"), ("topk", ".5"), ("powersgd", "4")):
        assert parse_codec(f"{kind}:{argument}") == CodecSpec(kind, float(argument))


UNKNOWN = ("", "INT8", "int4", "topk", "topk:", "topk:x", "topk:1e-3", "powersgd:-1", "int8:2", "bf16 ")
REASONS = {
    **dict.fromkeys(UNKNOWN, r"unknown codec; use one of bf16, .*topk:0\.01.*powersgd:4"),
    **dict.fromkeys(("topk:0", "topk:1", "topk:0.0", "topk:7"), "above 0 and below 1"),
    **dict.fromkeys(("powersgd:0", "powersgd:1.5", "powersgd:257"), "whole number from 1 to 256"),
}


@pytest.mark.parametrize("text", REASONS)
def test_a_name_that_is_none_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(repr(text))}.*{REASONS[text]}"):
        parse_codec(text)
