"""Peers of the comparison: what they start, how their servers count, and how they stand in for our own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hubring.ps.core.errors import ConfigError, HubringError, UsageError
from hubring.ps.core.messages import ReduceOp
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.ps.optim.hyper import hyper_of
from hubring.workers import collectives
from hubring.workers.buckets.bucketing import Bucket, make_buckets
from hubring.workers.communicators.base import Communicator
from hubring.workers.compare.experiment.experiment import Experiment, LinkTable
from hubring.workers.compare.peers import ray_server, rows, rpc_server
from hubring.workers.compare.peers.after_backward import AfterBackward
from hubring.workers.compare.peers.interface import interface
from hubring.workers.compare.peers.peer import Answer, Peer, Seat
from hubring.workers.compare.peers.rows import PEERS, PeerPrograms, Program, find

SIZE = 3


class Here:
    apart = False

    def local_rank(self, rank: int) -> int:
        return rank

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def address(self, role: str) -> str:
        return "127.0.0.1"


class Apart:
    apart = True

    def local_rank(self, rank: int) -> int:
        return 0

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        return ["on", role, *argv]

    def address(self, role: str) -> str:
        return f"address of {role}"


def programs(name: str, **told: Any) -> PeerPrograms:
    return PeerPrograms(find(name), 2, Path("/run"), **{"hosts": Here(), **told})


def start(told: PeerPrograms) -> list[Program]:
    return told.worker_programs(lambda rank: ["--record", f"record {rank}", "train.py", "5"])


def value(argv: Sequence[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


# Programs.


@pytest.mark.parametrize("name", ["ddp", "rpc", "ray"])
def test_every_worker_is_a_program_with_its_rank_and_the_script_last(name: str) -> None:
    workers = start(programs(name))
    assert [worker.name for worker in workers] == ["worker 0", "worker 1"]
    assert [value(worker.argv, "--rank") for worker in workers] == ["0", "1"]
    assert [value(worker.argv, "--local-rank") for worker in workers] == ["0", "1"]
    assert {value(worker.argv, "--meet") for worker in workers} == {"/run/meet"}
    assert [worker.argv[-4:] for worker in workers] == [
        ["--record", f"record {rank}", "train.py", "5"] for rank in range(2)
    ]


def test_mpi_starts_all_ranks_by_one_mpirun_which_tells_local_ranks() -> None:
    (program,) = start(programs("mpi"))
    first, second = " ".join(program.argv).split(" : ")
    assert (program.argv[0], "--rank 0" in first, "--rank 1" in second) == ("mpirun", True, True)
    assert "--local-rank" not in program.argv


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


def test_a_result_is_what_the_worker_wrote(tmp_path: Path) -> None:
    told = PeerPrograms(find("mpi"), 1, tmp_path, Here())
    (program,) = start(told)
    Path(value(program.argv, "--result")).write_text('{"steps": 5}')
    assert told.result(0) == {"steps": 5}


# What is missing.


def test_a_peer_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageError, match="no peer 'nccl'; there are ddp, mpi, rpc, ray"):
        find("nccl")


@pytest.mark.parametrize(("name", "extra"), [("mpi", "peers-mpi"), ("ray", "peers-ray")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "which", lambda _: "/usr/bin/mpirun")
    monkeypatch.setattr(rows, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=rf"row {name}: .* \(pip install 'hubring\[{extra}\]'"):
        find(name).check()


def test_without_mpirun_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "which", lambda _: None)
    with pytest.raises(UsageError, match="apt install openmpi-bin"):
        find("mpi").check()


def test_ray_is_refused_behind_links() -> None:
    with pytest.raises(UsageError, match="row ray runs on one machine"):
        Experiment(job="digits", rows=("local", "ray"), link=LinkTable(rate=(1e9,)))


@pytest.mark.parametrize("name", PEERS)
def test_extras_that_messages_name_exist(name: str) -> None:
    needs = PEERS[name].needs
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert needs is None or f"{needs[1]} = [" in project


def test_a_seat_outside_the_team_is_refused() -> None:
    with pytest.raises(UsageError, match="--rank 2 of --world-size 2"):
        Seat(rank=2, size=2, meet="/run/meet")


def test_an_address_has_its_interface_and_a_strange_one_is_named() -> None:
    assert interface("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77: no interface here .* lo 127\.0\.0\.1"):
        interface("192.0.2.77")


# The group's end.

LEFT_BEHIND = """
import os
import torch
import hubring

hubring.init()
model = torch.nn.Linear(4, 1)
optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def threads():
    names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
    return [name for name in names if "gloo" in name]


assert threads()
hubring.shutdown()
assert not threads()
model(torch.ones(2, 4)).sum().backward()  # it goes on alone
"""


@pytest.mark.slow
def test_ddps_group_ends_with_its_threads_although_the_script_keeps_its_model(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEFT_BEHIND)
    told = PeerPrograms(find("ddp"), 1, tmp_path, Here())
    (worker,) = told.worker_programs(lambda _: [str(script)])
    ended = subprocess.run(worker.argv, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert told.result(0)["steps"] == 2


# Collectives.


class Table:
    """Where threads gather."""

    def __init__(self) -> None:
        self.given: dict[int, Any] = {}
        self.barrier = threading.Barrier(SIZE)


class Seated(Peer):
    """A peer whose ranks are threads."""

    topology = "threads"
    bytes_are = "counted"
    optimizer = AfterBackward

    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(Seat(rank=rank, size=SIZE, meet="/table", timeout=10))
        self._table = table

    def gather(self, value: Any) -> list[Any]:
        self._table.given[self.rank] = value
        self._table.barrier.wait(10)
        everything = [self._table.given[rank] for rank in range(SIZE)]
        self._table.barrier.wait(10)
        return everything

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
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
        with pytest.raises(UsageError, match="all call in one order"):
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


def test_all_ranks_begin_with_rank_0s_parameters() -> None:
    def action(peer: Communicator) -> list[float]:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(model.weight, peer.rank + 5.0)
        peer.attach(buckets_of(model))
        values: list[float] = model.weight.flatten().tolist()
        return values

    assert on_all_ranks(action) == [[5.0, 5.0]] * SIZE


def test_another_model_is_refused() -> None:
    def action(peer: Communicator) -> None:
        with pytest.raises(ConfigError, match="rank 1 trains another model than rank 0"):
            peer.attach(buckets_of(torch.nn.Linear(2, 1 + (peer.rank == 1))))

    on_all_ranks(action)


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32 and float64, and bias is bfloat16"):
        Seated(0, Table()).attach(buckets_of(torch.nn.Linear(2, 1).bfloat16()))


# When gradients go, and how answers come.


class Alone(Seated):
    """One rank, which notes what it is asked for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(0, Table())
        self.size = 1
        self.events = events

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        self.events.append("push")
        return Work("nothing", 0)


def test_nothing_is_exchanged_before_backward_has_ended() -> None:
    events: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    peer = Alone(events)
    optimizer = AfterBackward(
        torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=peer, bucket_bytes=1
    )
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert events == [*["gradient"] * 4, *["push"] * 4] * 2


def test_an_answer_is_fetched_once_by_whoever_waits() -> None:
    fetched: list[int] = []
    answer = Answer("the exchange", lambda: fetched.append(1))
    assert not fetched
    answer.wait()
    answer.wait()
    assert fetched == [1]


def test_a_failed_answer_says_of_which_exchange_each_time() -> None:
    def fetch() -> None:
        raise OSError("gone")

    answer = Answer("the exchange of bucket 3", fetch)
    for _ in range(2):
        with pytest.raises(HubringError, match="the exchange of bucket 3 failed: gone"):
            answer.wait()


def test_an_allreduce_counts_what_a_ring_sends() -> None:
    peer = Seated(0, Table())
    peer.count_allreduce(300)
    assert (peer.traffic.bytes_sent, peer.traffic.bytes_received) == (400, 400)


# Servers.


def stepped(gradients: Sequence[Sequence[float]]) -> tuple[list[float], Hyper]:
    """What torch's SGD makes of zeros in two steps of the mean gradient."""
    values = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([values], lr=0.5, momentum=0.9)
    for _ in range(2):
        values.grad = torch.tensor(gradients).mean(dim=0)
        optimizer.step()
    return values.tolist(), hyper_of(optimizer.param_groups[0], "SGD")


GRADIENTS = [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]


def test_rpcs_server_answers_all_once_the_last_rank_has_given() -> None:
    expected, hyper = stepped(GRADIENTS)
    held = rpc_server.Round(torch.zeros(2), "SGD", SIZE)
    for _ in range(2):
        answers = [held.push(torch.tensor(one), hyper) for one in GRADIENTS[:-1]]
        assert not any(answer.done() for answer in answers)
        answers.append(held.push(torch.tensor(GRADIENTS[-1]), hyper))
        came = [answer.wait().tolist() for answer in answers]
    assert came == [pytest.approx(expected)] * SIZE


def test_rpcs_server_averages_for_workers_that_step() -> None:
    held = rpc_server.Round(torch.zeros(2), "", SIZE)
    answers = [held.push(torch.tensor(one), {}) for one in GRADIENTS]
    assert [answer.wait().tolist() for answer in answers] == [[3.0, 5.0]] * SIZE


def test_rpcs_gathering_is_in_rank_order_and_begins_anew() -> None:
    gathering = rpc_server.Gathering(2)
    for word in ("first", "second"):
        late, last = gathering.give(1, f"{word} 1"), gathering.give(0, f"{word} 0")
        assert late.wait() == last.wait() == [f"{word} 0", f"{word} 1"]


def test_rays_actor_steps_and_gathers_as_rpcs_server() -> None:
    expected, hyper = stepped(GRADIENTS)

    async def train() -> None:
        server = ray_server.Server(SIZE)
        names = await asyncio.gather(*(server.gather(rank, f"rank {rank}") for rank in reversed(range(SIZE))))
        assert names == [["rank 0", "rank 1", "rank 2"]] * SIZE
        await server.hold([np.zeros(2, np.float32)], ["SGD"])
        given = [np.array(one, np.float32) for one in GRADIENTS]
        for _ in range(2):
            came = await asyncio.gather(*(server.push_pull(0, one, hyper) for one in given))
        assert [one.tolist() for one in came] == [pytest.approx(expected)] * SIZE
        ending = asyncio.ensure_future(server.end())
        for _ in range(SIZE):
            assert not ending.done()
            await server.leave()
        await ending

    threads = torch.get_num_threads()
    try:
        asyncio.run(train())
    finally:
        torch.set_num_threads(threads)


def test_talking_through_an_address_tells_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from hubring.workers.compare.peers import interface as module

    for name in module._ASKED:
        monkeypatch.setenv(name, "")
    module.talk_through("127.0.0.1")
    assert {os.environ[name] for name in module._ASKED} == {"lo"}
