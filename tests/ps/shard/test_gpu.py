"""`--device`: what is said where the GPU asked for is not to be had."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.core.errors import ConfigError
from hubring.ps.shard import gpu
from tests.support.fakes.cuda import has_gpus


def test_a_gpu_is_named_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 2)
    assert gpu.find("cuda") == torch.device("cuda", 0)
    assert gpu.find("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "torch.* finds no GPU on this host; use --device cpu"),
        (2, r"torch finds only 2 GPU\(s\) on this host; use cuda:0 to cuda:1"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, count: int, told: str
) -> None:
    has_gpus(monkeypatch, count)
    with pytest.raises(ConfigError, match=f"--device cuda:2: {told}"):
        gpu.find("cuda:2")
