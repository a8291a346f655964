"""Which part of a sharded parameter a rank holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hubring.workers.audit.shard import local, shard


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
