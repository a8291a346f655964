"""Which GPU a worker of a ring over NCCL gets."""

from __future__ import annotations

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers.placement import Placement
from hubring.workers.runtime.topology import choose_device
from tests.support.fakes.gpu import has_gpus


def test_each_local_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 4)
    names = [choose_device("nccl", Placement(local_rank=rank, local_size=4), {}).device for rank in range(4)]
    assert names == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_gpu_that_the_launcher_gave_is_this_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 1)
    choice = choose_device("nccl", Placement(local_rank=3, local_size=4), {"CUDA_VISIBLE_DEVICES": "3"})
    assert choice.device == "cuda:0"
    assert "CUDA_VISIBLE_DEVICES=3" in choice.why


def test_more_workers_than_gpus_are_refused_with_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 2)
    with pytest.raises(
        ConfigError, match=r"local rank 2.*finds 2 GPU\(s\) on this host \(CUDA_VISIBLE_DEVICES=4,5\)"
    ):
        choose_device("nccl", Placement(local_rank=2, local_size=3), {"CUDA_VISIBLE_DEVICES": "4,5"})
    with pytest.raises(ConfigError, match="local rank 2"):
        choose_device("nccl", Placement(local_rank=2, local_size=3), {})


def test_nccl_without_a_gpu_is_refused_and_gloo_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match="use --backend gloo"):
        choose_device("nccl", Placement(), {})
    assert choose_device("gloo", Placement(local_rank=5), {}).device == "cpu"
