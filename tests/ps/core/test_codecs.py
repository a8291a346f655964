from __future__ import annotations

import pytest

from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import CodecSpec, parse_codec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("bf16", CodecSpec("bf16")),
        ("fp16", CodecSpec("fp16")),
        ("int8", CodecSpec("int8")),
        ("sign", CodecSpec("sign")),
        ("topk:0.01", CodecSpec("topk", 0.01)),
        ("topk:.5", CodecSpec("topk", 0.5)),
        ("powersgd:4", CodecSpec("powersgd", 4)),
    ],
)
def test_a_name_says_kind_and_argument(text: str, spec: CodecSpec) -> None:
    assert parse_codec(text) == spec


@pytest.mark.parametrize(
    "text", ["", "INT8", "int4", "topk", "topk:", "topk:x", "topk:1e-3", "powersgd:-1", "int8:2", "bf16 "]
)
def test_an_unknown_name_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown codec; use one of bf16, .*topk:0\.01.*powersgd:4"
    ) as caught:
        parse_codec(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["topk:0", "topk:1", "topk:0.0", "topk:7"])
def test_a_fraction_lies_between_0_and_1(text: str) -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        parse_codec(text)


@pytest.mark.parametrize("text", ["powersgd:0", "powersgd:1.5", "powersgd:257"])
def test_a_rank_is_a_whole_number(text: str) -> None:
    with pytest.raises(ConfigError, match="whole number from 1 to 256"):
        parse_codec(text)


def test_a_worker_refuses_a_codec_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="compression 'zip'"):
        WorkerConfig(compress="zip")


def test_powersgd_on_a_hub_needs_aggregate() -> None:
    with pytest.raises(ConfigError, match="add --aggregate"):
        WorkerConfig(server="h:1", compress="powersgd:4")
    assert WorkerConfig(server="h:1", compress="powersgd:4", aggregate=True).aggregate
    assert WorkerConfig(server="h:1", compress="powersgd:4", topology="ring").topology == "ring"


def test_nccl_takes_no_codec() -> None:
    with pytest.raises(ConfigError, match="--compress bf16 requires --backend gloo, not --backend nccl"):
        WorkerConfig(server="h:1", topology="ring", backend="nccl", compress="bf16")
