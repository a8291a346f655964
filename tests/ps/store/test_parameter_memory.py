"""A store whose tensors are on a GPU, played on the CPU with a GPU's memory that one process pretends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hubring.ps.compression import gpu_tensor
from hubring.ps.compression.gpu_tensor import Reached
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Code, Coded, Delivery, Init, Pull, Push, Values
from hubring.ps.core.types import BucketSpec, Hyper, Member, Sender, Slice, TensorSpec, View
from hubring.ps.optim.block_optimizers import optimizer_for
from hubring.ps.store.consistency import ASP, BSP, Consistency
from hubring.ps.store.key_state import KeyEntry
from hubring.ps.store.parameter_memory import GpuMemory, find_gpu
from hubring.ps.store.store import KVStore
from tests.support.fakes.gpu import FakeMemory, has_gpus
from tests.support.store import refusal_of, snapshot_of

SGD: Hyper = {"lr": 0.5, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": 0, "maximize": 0}
CPU = torch.device("cpu")


class OnGpu:
    """A shard with one key of four zeros, and two workers on its GPU."""

    def __init__(self, consistency: Consistency | None = None) -> None:
        self.memory = FakeMemory()
        self.store = KVStore(consistency or BSP(), GpuMemory(CPU, self.memory))
        self.view(1, Sender(0, 1), Sender(1, 1))
        self.store.assign([Slice(0, 0, 0, 4, 0)], [bucket()])
        self.store.handle(Init(Sender(0, 1), 0, torch.zeros(4)), "init")

    def view(self, epoch: int, *senders: Sender) -> None:
        self.store.on_view(View(epoch, tuple(Member(*sender) for sender in senders)))

    def place(self, gradient: Tensor) -> Coded:
        return gpu_tensor.placed(gpu_tensor.encode(self.memory.share(gradient)), gradient)

    def push(self, rank: int, gradient: Tensor | Coded, ticket: str, clock: int = 0) -> list[Delivery]:
        return self.store.handle(Push(Sender(rank, 1), 0, clock, gradient, SGD), ticket)

    def seen(self, answer: object) -> Tensor:
        assert isinstance(answer, Coded)
        return Reached(self.memory).tensor(answer)[0]


def bucket(optimizer: str = "SGD", codec: str = "") -> BucketSpec:
    return BucketSpec(0, "float32", optimizer, (TensorSpec("weight", (4,)),), codec)


def answers(deliveries: list[Delivery]) -> dict[object, Tensor | Coded | None]:
    return {ticket: reply.values for ticket, reply in deliveries if isinstance(reply, Values)}


def test_a_placed_gradient_is_read_where_it_lies_when_the_round_closes() -> None:
    hub = OnGpu()
    gradient = torch.zeros(4)
    hub.push(0, hub.place(gradient), "near")
    gradient.fill_(2)  # the retry of a push whose sender had not finished would show it
    given = answers(hub.push(1, torch.full((4,), 4.0), "far"))
    assert hub.seen(given["near"]).tolist() == [-1.5] * 4


def test_a_retry_gets_a_place_again_and_a_pull_gets_values() -> None:
    hub = OnGpu()
    near = hub.place(torch.ones(4))
    hub.push(0, near, "first")
    assert hub.push(0, near, "again") == []
    given = answers(hub.push(1, torch.ones(4), "far"))
    assert given.keys() == {"first", "again", "far"}
    later = answers(hub.push(0, near, "later"))["later"]
    assert hub.seen(later).tolist() == [-0.5] * 4
    pulled = answers(hub.store.handle(Pull(Sender(0, 1), 0), "pull"))["pull"]
    assert isinstance(pulled, Tensor)


def test_places_are_refused_where_values_may_change_while_they_are_read() -> None:
    hub = OnGpu(ASP())
    refusal = refusal_of(hub.push(0, hub.place(torch.ones(4)), "near"))
    assert refusal.code is Code.WRONG_SIZE
    assert "expects uncompressed gradients, got a gradient in cuda-ipc" in refusal.text


def test_a_place_that_cannot_be_reached_leaves_the_round_open_for_another_try() -> None:
    hub = OnGpu()
    near = hub.place(torch.full((4,), 2.0))
    storages, hub.memory._storages = hub.memory._storages, {}
    with pytest.raises(ConfigError, match="cannot reach"):
        hub.push(0, near, "near")
    hub.memory._storages = storages
    assert hub.push(0, near, "again") == []
    assert answers(hub.push(1, torch.full((4,), 4.0), "far")).keys() == {"again", "far"}


def test_a_storage_is_opened_once_and_let_go_with_its_worker() -> None:
    hub = OnGpu()
    gradients = torch.ones(8)
    for clock in range(3):
        hub.push(0, hub.place(gradients[4:]), "near", clock)
        hub.push(1, torch.ones(4), "far", clock)
    assert len(hub.memory.opened) == 1
    memory = hub.store._memory
    assert isinstance(memory, GpuMemory)
    hub.view(2, Sender(1, 1))
    assert memory._reached == {}


def test_a_checkpoint_of_a_gpu_goes_on_in_host_memory_and_back() -> None:
    hub = OnGpu()
    hub.push(0, torch.ones(4), "a")
    hub.push(1, torch.ones(4), "b")
    snapshot = snapshot_of(hub.store)
    assert snapshot[0].values.device == CPU
    other = OnGpu()
    other.store.restore(snapshot)
    given = answers(other.store.handle(Pull(Sender(0, 1), 0), "look"))["look"]
    assert isinstance(given, Tensor)
    assert given.tolist() == [-0.5] * 4


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad"])
def test_what_has_no_fused_kernel_on_the_gpu_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not support {name} on cuda; use one of SGD, Adam, AdamW"):
        optimizer_for(name, torch.device("cuda"))


def test_compression_is_refused_where_values_are_not_on_the_cpu() -> None:
    memory = torch.zeros(16, dtype=torch.uint8, device="meta")
    with pytest.raises(ConfigError, match=r"--compress int8 runs only on the CPU.*on meta"):
        KeyEntry.make(Slice(0, 0, 0, 4, 0), bucket(codec="int8"), memory)


def test_a_gpu_is_named_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 2)
    assert find_gpu("cuda") == torch.device("cuda", 0)
    assert find_gpu("cuda:1") == torch.device("cuda", 1)


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
        find_gpu("cuda:2")
