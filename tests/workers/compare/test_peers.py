"""Peers of the comparison: what a run of one starts, and how it stands in for our own ways."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hubring.ps.core.errors import ConfigError, HubringError, UsageError
from hubring.ps.core.messages import ReduceOp
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers import collectives
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.communicators.base import Communicator
from hubring.workers.compare.plan.experiment import Experiment, LinkTable
from hubring.workers.compare.run.peers.peer import PeerCommunicator
from hubring.workers.compare.run.peers.served import AfterBackward, Served
from hubring.workers.compare.run.programs import PeerPrograms, Program
from hubring.workers.compare.run.site import LocalHosts
from hubring.workers.peers.rendezvous import PeerRendezvous
from hubring.workers.peers.rows import find_peer

SIZE = 3


class Apart:
    apart = True

    def local_rank(self, rank: int) -> int:
        return 0

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        return ["on", role, *argv]

    def address(self, role: str) -> str:
        return f"address of {role}"


def programs(name: str, **told: Any) -> PeerPrograms:
    return PeerPrograms(find_peer(name), 2, Path("/run"), **{"hosts": LocalHosts(), **told})


def start(told: PeerPrograms) -> list[Program]:
    return told.worker_programs(lambda rank: ["--record", f"record {rank}", "train.py", "5"])


def value(argv: Sequence[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


# Programs.


def test_mpi_starts_all_ranks_by_one_mpirun_which_tells_local_ranks() -> None:
    (program,) = start(programs("mpi"))
    first, second = " ".join(program.argv).split(" : ")
    assert (program.argv[0], "--rank 0" in first, "--rank 1" in second) == ("mpirun", True, True)
    assert "--local-rank" not in program.argv
    assert [value(each.argv, "--local-rank") for each in start(programs("ddp"))] == ["0", "1"]


def test_rpc_has_as_many_servers_as_the_setting_and_ray_one_actor() -> None:
    assert [each.name for each in programs("rpc", servers=2).server_programs()] == ["server", "shard 1"]
    assert [each.name for each in programs("ray", servers=2).server_programs()] == ["server"]
    assert programs("ddp", servers=2).server_programs() == []
    assert {value(each.argv, "--servers") for each in start(programs("rpc", servers=2))} == {"2"}


def test_behind_links_every_program_runs_on_its_host_and_is_told_its_address() -> None:
    told = programs("rpc", servers=2, hosts=Apart())
    started = [*told.server_programs(), *start(told)]
    assert [(each.argv[1], value(each.argv, "--host")) for each in started] == [
        (each.name, f"address of {each.name}") for each in started
    ]
    assert {value(each.argv, "--local-rank") for each in start(told)} == {"0"}
    (mpirun,) = start(programs("mpi", hosts=Apart()))
    assert mpirun.argv[:3] == ["on", "server", "env"]
    assert mpirun.argv.count("on") == 3


def test_ray_is_refused_behind_links() -> None:
    with pytest.raises(UsageError, match="row ray needs one machine"):
        Experiment(job="digits", rows=("local", "ray"), link=LinkTable(rate=(1e9,)))


# Collectives.


class Table:
    """Where threads gather."""

    def __init__(self) -> None:
        self.given: dict[int, Any] = {}
        self.barrier = threading.Barrier(SIZE)


class Seated(PeerCommunicator):
    """A peer whose ranks are threads."""

    topology = "threads"
    bytes_are = "counted"
    optimizer = AfterBackward

    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(PeerRendezvous(rank=rank, size=SIZE, meet="/table", timeout=10))
        self._table = table

    def gather(self, value: Any) -> list[Any]:
        self._table.given[self.rank] = value
        self._table.barrier.wait(10)
        everything = [self._table.given[rank] for rank in range(SIZE)]
        self._table.barrier.wait(10)
        return everything

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        raise AssertionError("nothing is trained here")

    def close(self, *, finished: bool) -> None:
        """Leaves nothing."""


def on_all_ranks(action: Callable[[Communicator], Any]) -> list[Any]:
    table = Table()
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: action(Seated(rank, table)), range(SIZE)))


def test_collectives_of_a_peer_are_those_of_the_hub() -> None:
    def action(peer: Communicator) -> tuple[float, float, list[float]]:
        own = torch.tensor([float(peer.rank + 1)])
        collectives.barrier("start", communicator=peer)
        return (
            collectives.allreduce(own, communicator=peer).item(),
            collectives.broadcast(own, root=2, communicator=peer).item(),
            collectives.allgather(own, communicator=peer).tolist(),
        )

    assert on_all_ranks(action) == [(2.0, 3.0, [1.0, 2.0, 3.0])] * SIZE


def test_ranks_that_disagree_are_told_in_the_hubs_words() -> None:
    def action(peer: Communicator) -> None:
        op = ReduceOp.SUM if peer.rank else ReduceOp.AVERAGE
        with pytest.raises(ConfigError, match="sum"):
            collectives.allreduce(torch.ones(1), op, communicator=peer)

    on_all_ranks(action)


def test_other_orders_and_single_partners_are_refused() -> None:
    def action(peer: Communicator) -> None:
        with pytest.raises(UsageError, match="all must call in one order"):
            collectives.barrier(f"of {peer.rank}", communicator=peer)
        if peer.rank == 0:
            with pytest.raises(UsageError, match="neither groups nor join, send and recv"):
                collectives.recv(1, communicator=peer)

    on_all_ranks(action)


def buckets_of(model: torch.nn.Module) -> list[Bucket]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_buckets(
        optimizer, model.named_parameters(), lambda n, kind: torch.zeros(n, dtype=kind), 1 << 20, ""
    )


def test_another_model_is_refused() -> None:
    def action(peer: Communicator) -> None:
        with pytest.raises(ConfigError, match="rank 1 trains another model than rank 0"):
            peer.attach(buckets_of(torch.nn.Linear(2, 1 + (peer.rank == 1))))

    on_all_ranks(action)


def test_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32 and float64, and bias is bfloat16"):
        Seated(0, Table()).attach(buckets_of(torch.nn.Linear(2, 1).bfloat16()))


class Keeper:
    """Servers of one worker, which take what they get and whose answers fail."""

    def __init__(self, seat: PeerRendezvous) -> None:
        """Connects to nothing."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def hold(self, number: int, values: torch.Tensor, optimizer: str, parameters: list[slice]) -> None:
        """Takes a slice."""

    def push_pull(self, *_: object) -> Callable[[], object]:
        def fetch() -> None:
            raise OSError("gone")

        return fetch


class OnServers(Served):
    topology = "keeper"
    client = Keeper  # type: ignore[assignment]  # as much of a client as is used


def test_servers_that_keep_their_state_leave_the_dict_its_groups(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(2)).sum().backward()
    adam.step()
    optimizer = AfterBackward(
        adam, model, communicator=OnServers(PeerRendezvous(rank=0, size=1, meet="/table"))
    )
    assert caplog.text.count("keeps its own state, not the loaded one") == 1
    saved = optimizer.state_dict()
    assert (saved["state"], saved["param_groups"][0]["lr"]) == ({}, 0.5)
    optimizer.load_state_dict(saved)
    assert caplog.text.count("keeps its own state, not the loaded one") == 1


# When gradients go, and how answers come.


def test_a_failed_answer_says_of_which_exchange_each_time() -> None:
    [bucket] = buckets_of(torch.nn.Linear(2, 1))
    peer = OnServers(PeerRendezvous(rank=0, size=1, meet="/table"))
    peer.attach([bucket])
    answer = peer.push_pull(bucket, {})
    for _ in range(2):
        with pytest.raises(HubringError, match="the exchange of bucket 0 failed: gone"):
            answer.wait()


def test_an_allreduce_counts_what_a_ring_sends() -> None:
    peer = Seated(0, Table())
    peer.count_passes(2, 300)
    assert (peer.traffic.bytes_sent, peer.traffic.bytes_received) == (400, 400)
