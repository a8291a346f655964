"""Peers: what they need, where they meet, and how their servers count."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hubring.ps.core import packages
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.types import Hyper
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.peers import ray, rendezvous, rows
from hubring.workers.peers.ray import Array
from hubring.workers.peers.rendezvous import PeerRendezvous
from hubring.workers.peers.rows import find_peer
from hubring.workers.peers.rpc import SliceRound

SIZE = 3


# What is missing.


def test_a_peer_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageError, match="no peer 'nccl'; expected one of ddp, fsdp2, zero1, mpi, rpc, ray"):
        find_peer("nccl")


@pytest.mark.parametrize(("name", "extra"), [("mpi", "peers-mpi"), ("ray", "ray")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "which", lambda _: "/usr/bin/mpirun")
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=rf"row {name}: .* is not installed; .* pip install '\.\[{extra}\]'"):
        find_peer(name).check()


def test_without_mpirun_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "which", lambda _: None)
    with pytest.raises(UsageError, match="apt install openmpi-bin"):
        find_peer("mpi").check()


def test_a_seat_outside_the_team_is_refused() -> None:
    with pytest.raises(UsageError, match="--rank 2 of --world-size 2"):
        PeerRendezvous(rank=2, size=2, meet="/run/meet")


def test_an_address_has_its_interface_and_a_strange_one_is_named() -> None:
    assert rendezvous.interface("127.0.0.1") == "lo"
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.77: no interface has that address; expected one of .*lo 127\.0\.0\.1"
    ):
        rendezvous.interface("192.0.2.77")


def test_talking_through_an_address_tells_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rendezvous._VARIABLES:
        monkeypatch.setenv(name, "")
    rendezvous.talk_through(None)
    assert {os.environ[name] for name in rendezvous._VARIABLES} == {""}
    rendezvous.talk_through("127.0.0.1")
    assert {os.environ[name] for name in rendezvous._VARIABLES} == {"lo"}


def test_nccl_keeps_the_interface_that_a_ring_has_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring leaves it to the user's variable, or to NCCL."""
    for name in rendezvous._VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    rendezvous.talk_through("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    rendezvous.talk_through("127.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in os.environ


# Servers.

GRADIENTS = [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]


def read_only() -> list[Array]:
    """The gradients as Ray hands them out."""
    given = [np.array(one, np.float32) for one in GRADIENTS]
    for each in given:
        each.flags.writeable = False
    return given


def stepped() -> tuple[list[float], Hyper]:
    """What torch's SGD makes of zeros in two steps of the mean gradient."""
    values = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([values], lr=0.5, momentum=0.9)
    for _ in range(2):
        values.grad = torch.tensor(GRADIENTS).mean(dim=0)
        optimizer.step()
    return values.tolist(), hyper_of(optimizer.param_groups[0], "SGD")


@pytest.fixture
def threads() -> Iterator[None]:
    """An actor gives its process one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_round_averages_for_workers_that_step_and_writes_only_to_what_it_keeps(keeps: bool) -> None:
    held = SliceRound(SIZE, torch.zeros(2), "", keeps=keeps)
    for _ in range(2):
        came: list[torch.Tensor] = []
        given = [torch.tensor(one) for one in GRADIENTS]
        for rank, one in enumerate(given):
            assert not came
            held.give(rank, (one, {}), came.append)
        assert [answer.tolist() for answer in came] == [[3.0, 5.0]] * SIZE
        assert ([one.tolist() for one in given] == GRADIENTS) is not keeps


@pytest.mark.usefixtures("threads")
def test_rays_actor_steps_and_gathers_as_rpcs_server() -> None:
    expected, hyper = stepped()

    async def train() -> None:
        actor = ray.RayActor(SIZE)
        names = await asyncio.gather(*(actor.gather(rank, f"rank {rank}") for rank in reversed(range(SIZE))))
        assert names == [["rank 0", "rank 1", "rank 2"]] * SIZE
        await actor.hold(0, np.zeros(2, np.float32), "SGD")
        given = read_only()
        for _ in range(2):
            came = await asyncio.gather(
                *(actor.push_pull(rank, 0, given[rank], hyper) for rank in range(SIZE))
            )
        assert [one.tolist() for one in came] == [pytest.approx(expected)] * SIZE
        ending = asyncio.ensure_future(actor.end())
        for _ in range(SIZE):
            assert not ending.done()
            await actor.leave()
        await ending

    asyncio.run(train())
