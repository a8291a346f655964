"""Which device a worker gets: the same in every topology."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, RingBroken
from hubring.workers.launchers.known_launchers import LauncherNumber
from hubring.workers.launchers.placement import Placement
from hubring.workers.runtime import topology
from hubring.workers.runtime.topology import check_gpus, choose_device
from tests.support.fakes.gpu import has_gpus

PAIR = Placement(local_rank=1, local_size=2)
SERVED = {"server": "hub:5555"}
TOPOLOGIES: list[dict[str, Any]] = [{}, SERVED, {**SERVED, "topology": "ring"}]


@pytest.mark.parametrize("asked", [("nccl", "auto"), ("gloo", "auto"), ("gloo", "cuda")])
def test_each_local_rank_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[str, str]
) -> None:
    has_gpus(monkeypatch, 4)
    names = [choose_device(*asked, Placement(local_rank=rank, local_size=4), {}).device for rank in range(4)]
    assert names == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


@pytest.mark.parametrize(
    ("gpus", "accelerator", "device"),
    [(2, "auto", "cuda:1"), (1, "auto", "cpu"), (0, "auto", "cpu"), (2, "cuda", "cuda:1"), (2, "cpu", "cpu")],
)
def test_the_device_is_the_same_on_a_hub_in_a_ring_and_alone(
    monkeypatch: pytest.MonkeyPatch, gpus: int, accelerator: Any, device: str
) -> None:
    current: list[torch.device] = []
    has_gpus(monkeypatch, gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    configs = [WorkerConfig(accelerator=accelerator, **each) for each in TOPOLOGIES]
    chosen = [topology.own_device(config, PAIR) for config in configs]
    assert chosen == [torch.device(device)] * 3
    assert current == ([] if device == "cpu" else chosen)


def test_gloo_exchanges_in_host_memory_for_a_worker_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, device: torch.device, **__: Any) -> None:
        raise RingBroken(str(device))

    monkeypatch.setattr(topology, "AllreduceCommunicator", opened)
    session: Any = SimpleNamespace(address="127.0.0.1:1", sender=SimpleNamespace(rank=0), size=2, board=None)
    for backend, device in (("gloo", "cpu"), ("nccl", "cuda:1")):
        config = WorkerConfig(server="127.0.0.1:1", topology="ring", backend=backend)  # type: ignore[arg-type]
        with pytest.raises(RingBroken, match=f"^{device}$"):
            topology._ring(config, session, torch.device("cuda:1"))


def test_a_gpu_that_the_launcher_gave_is_this_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 1)
    given = {"CUDA_VISIBLE_DEVICES": "3"}
    for backend in ("nccl", "gloo"):
        choice = choose_device(backend, "auto", Placement(local_rank=3, local_size=4), given)
        assert choice.device == "cuda:0"
        assert "CUDA_VISIBLE_DEVICES=3" in choice.why


def test_more_workers_than_gpus_are_refused_with_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 2)
    with pytest.raises(
        ConfigError, match=r"local rank 2.*finds 2 GPU\(s\) on this host \(CUDA_VISIBLE_DEVICES=4,5\)"
    ):
        choose_device("nccl", "auto", Placement(local_rank=2, local_size=3), {"CUDA_VISIBLE_DEVICES": "4,5"})
    with pytest.raises(ConfigError, match="local rank 2"):
        choose_device("gloo", "cuda", Placement(local_rank=2, local_size=3), {})


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"--backend nccl needs a CUDA device.*use --backend gloo"):
        choose_device("nccl", "auto", Placement(), {})
    with pytest.raises(ConfigError, match=r"--accelerator cuda needs a CUDA device.*use --accelerator cpu"):
        choose_device("gloo", "cuda", Placement(), {})
    with pytest.raises(ConfigError, match="--backend nccl requires --accelerator cuda"):
        WorkerConfig(server="hub:1", topology="ring", backend="nccl", accelerator="cpu")


LOCAL = LauncherNumber("local_rank", 0, "--local-rank 0")
BY_HAND, PLACED = Placement(), Placement(readings=(LOCAL,))
PS_RUN, SRUN = (Placement(launcher=name, readings=(LOCAL,)) for name in ("ps-run", "slurm"))
MAYBE, SHARED = (
    "2 workers of this host may all be on cuda:0: pass --local-rank",
    "2 workers of this host share",
)


@pytest.mark.parametrize(
    ("visible", "place", "said"),
    [
        ("0,1", BY_HAND, MAYBE),
        ("0,1", PLACED, ""),
        ("0", PS_RUN, SHARED),
        ("1", SRUN, ""),
        ("1", BY_HAND, ""),
    ],
)
def test_workers_that_take_one_gpu_are_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    visible: str,
    place: Placement,
    said: str,
) -> None:
    has_gpus(monkeypatch, len(visible.split(",")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with caplog.at_level("INFO"):
        topology.note_shared_gpu(torch.device("cuda:0"), place, 2)
    assert said in caplog.text if said else caplog.text == ""


@pytest.mark.parametrize(("gpus", "fix"), [(0, "own; add"), (1, "own; start at most --gpus 1, or add")])
def test_fewer_gpus_than_asked_for_are_an_error(monkeypatch: pytest.MonkeyPatch, gpus: int, fix: str) -> None:
    has_gpus(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=rf"--gpus 2: torch finds {gpus} GPU\(s\).*{fix} --accelerator cpu"):
        check_gpus(2)
    has_gpus(monkeypatch, 2)
    check_gpus(2)
