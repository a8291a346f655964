"""Sampled elements are those of the flat tensor, and the same on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hubring.workers.audit.sample import MOST, MOST_OF_LARGE, MOST_OF_TENSOR, local, sample, shard


@pytest.mark.parametrize("shape", [(1,), (7,), (64, 64), (3, 4, 5, 6), (512, 10), (100_003,)])
def test_elements_are_those_of_the_flat_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    chosen = sample("weight", tensor.numel(), 4)
    assert chosen.of(tensor).tolist() == list(chosen.elements)
    assert 0 <= chosen.elements[0] <= chosen.elements[-1] < tensor.numel()
    assert len(set(chosen.elements)) == min(tensor.numel(), MOST_OF_TENSOR)


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_of_a_tensor_have_the_elements_that_they_hold(parts: int) -> None:
    tensor, found = torch.arange(700), list[int]()
    chosen = sample("weight", 700, 20)
    for number in range(parts):
        part = tensor.tensor_split(parts)[number]
        where, held = chosen.within(int(part[0]), len(part))
        assert held.of(part).tolist() == list(chosen.elements)[where]
        found += held.of(part).tolist()
    assert found == list(chosen.elements)
    assert chosen.within(700, 0)[1].number == 0


def test_elements_are_of_many_columns() -> None:
    assert len({element % 10 for element in sample("weight", 5120, 1).elements}) == 10


def test_order_in_memory_makes_no_difference() -> None:
    tensor = torch.randn(6, 4, 3, 3)
    chosen = sample("weight", tensor.numel(), 1)
    last = tensor.to(memory_format=torch.channels_last)
    for same in (last, tensor.to_sparse(), tensor.clone().requires_grad_()):
        assert torch.equal(chosen.of(same), chosen.of(tensor))


def test_a_model_of_many_parameters_has_few_elements_of_each() -> None:
    assert sample("weight", 10_000, 500).number * 500 <= MOST
    assert sample("weight", 10_000, 5_000).number == 2
    assert sample("empty", 0, 1).number == 0


@pytest.mark.parametrize("numel", [10_000_000, 100_000_000])
@pytest.mark.parametrize("parameters", [1, 161])
def test_every_slice_of_a_large_parameter_has_elements(numel: int, parameters: int) -> None:
    chosen = sample("embedding", numel, parameters)
    whole = numel * 4 // (4 << 20)
    assert set(range(whole)) <= {element * 4 // (4 << 20) for element in chosen.elements}


def test_there_are_bounds_on_the_elements_of_a_large_parameter() -> None:
    assert sample("huge", 10**11, 1).number == MOST_OF_LARGE
    assert sample("large", 1 << 30, 1, 2).number == 2048


@pytest.mark.parametrize("rows", [7, 6, 2, 1])
@pytest.mark.parametrize("rank", range(3))
def test_a_shard_is_what_torch_holds(rows: int, rank: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=3)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
        whole = torch.arange(4.0 * rows).reshape(rows, 4)
        held = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        first, number = shard(held)
        assert isinstance(held, DTensor)
        assert local(held).flatten().tolist() == whole.flatten()[first : first + number].tolist()
    finally:
        dist.destroy_process_group()


def test_an_ordinary_tensor_is_a_whole() -> None:
    tensor = torch.ones(2, 3)
    assert shard(tensor) == (0, 6)
    assert local(tensor) is tensor
