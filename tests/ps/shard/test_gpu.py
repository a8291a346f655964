"""`--device`: what is said where the GPU asked for is not to be had."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.sources import load_server
from hubring.ps.core.errors import ConfigError
from hubring.ps.shard import gpu
from tests.support.processes.cluster import Cluster


def has(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_gpu_is_named_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 2)
    assert gpu.find("cuda") == torch.device("cuda", 0)
    assert gpu.find("cuda:1") == torch.device("cuda", 1)


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 0)
    with pytest.raises(
        ConfigError, match=r"--device cuda:1: torch.* finds no GPU on this host; use --device cpu"
    ):
        gpu.find("cuda:1")


def test_an_index_too_high_is_told_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 2)
    with pytest.raises(
        ConfigError, match=r"--device cuda:2: torch finds only 2 GPU\(s\) on this host; use cuda:0 to cuda:1"
    ):
        gpu.find("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA"])
def test_what_names_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--device.*expected cpu, cuda or cuda:N"):
        load_server({"device": name}, environment={})


def test_a_host_that_joins_says_where_its_own_shards_step() -> None:
    assert ServerConfig(join="127.0.0.1:5555", device="cuda:1").device == "cuda:1"


def test_colocated_shards_have_no_device_of_the_servers() -> None:
    with pytest.raises(ConfigError, match="--device cuda applies to shards on this host"):
        ServerConfig(colocate=True, device="cuda")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_program_ends_with_a_sentence_before_it_starts_anything(cluster: Cluster) -> None:
    server = cluster.run("server", "hubring.ps.cli", "start", "--port", "0", "--device", "cuda")
    assert "finds no GPU on this host; use --device cpu" in server.done(78)["error"]
    assert "ps-server on" not in server.said()
