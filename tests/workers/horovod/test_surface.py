"""What scripts touch, held against Horovod 0.28.1: names, arguments, what is refused and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hubring.horovod as hvd
from hubring.workers.horovod.elastic.object_state import ObjectState
from hubring.workers.horovod.errors import HorovodVersionMismatchError
from hubring.workers.horovod.runner.run import run
from tests.workers.horovod.conftest import Everybody

SCALED = "prescale_factor postscale_factor process_set"
REDUCED = f"average name op {SCALED}"
SCATTERED = "op process_set prescale_factor postscale_factor"
ARGUMENTS = {
    "init": "comm process_sets",
    "start_timeline": "file_path mark_cycles",
    "allreduce": f"tensor average name compression op {SCALED}",
    "allreduce_": f"tensor {REDUCED}",
    "allreduce_async": f"tensor {REDUCED}",
    "allreduce_async_": f"tensor {REDUCED}",
    "grouped_allreduce": f"tensors average name compression op {SCALED}",
    "grouped_allreduce_": f"tensors {REDUCED}",
    "grouped_allreduce_async": f"tensors {REDUCED}",
    "grouped_allreduce_async_": f"tensors {REDUCED}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": f"tensor name compression {SCATTERED}",
    "reducescatter_async": f"tensor name {SCATTERED}",
    "grouped_reducescatter": f"tensors name compression {SCATTERED}",
    "grouped_reducescatter_async": f"tensors name {SCATTERED}",
    "join": "device",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op"
    " gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}
RUN = (
    "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile"
    " host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose"
    " use_gloo use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
)
DEFAULTS = {
    "average": None,
    "name": None,
    "compression": hvd.Compression.none,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": hvd.global_process_set,
    "splits": None,
    "device": -1,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_horovods_names_order_and_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters
    wanted = ARGUMENTS[name].split()
    assert list(parameters)[: len(wanted)] == wanted
    for argument, parameter in parameters.items():
        if parameter.default is not parameter.empty and argument in DEFAULTS:
            assert parameter.default is DEFAULTS[argument] or parameter.default == DEFAULTS[argument]


def test_horovod_run_takes_horovods_arguments() -> None:
    assert list(inspect.signature(run).parameters)[: len(RUN.split())] == RUN.split()
    with pytest.raises(ValueError, match="use_gloo and use_mpi"):
        run(print, use_gloo=True, use_mpi=True)
    with pytest.raises(ValueError, match="Hubring has no MPI"):
        run(print, use_mpi=True)
    with pytest.raises(ValueError, match="hosts= and hostfile= are both set"):
        run(print, hosts="localhost:1", hostfile="hosts")
    with pytest.raises(ValueError, match="min_num_proc <= num_proc"):
        run(print, num_proc=1, min_num_proc=2)
    with (
        pytest.warns(DeprecationWarning, match="np is deprecated"),
        pytest.raises(ValueError, match="num_proc=0"),
    ):
        run(print, np=0)


def test_before_init_operations_fail_as_horovods_core_and_python_part_do() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_async(torch.ones(1), 0),
        hvd.join,
        hvd.barrier,
    ]
    for call in calls:
        with pytest.raises(hvd.HorovodInternalError, match="not been initialized"):
            call()
    assert hvd.synchronize(7) is None
    with pytest.raises(ValueError, match="was not created"):
        hvd.poll(7)
    assert hvd.global_process_set.ranks == []
    assert str(hvd.global_process_set) == "ProcessSet(process_set_id=0, ranks=[], mpi_comm=None)"
    hvd.shutdown()


def test_errors_may_be_caught_by_horovods_bases() -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(HorovodVersionMismatchError, ImportError)
    error = HorovodVersionMismatchError("torch", "2", "1")
    assert (error.name, error.version, error.installed_version) == ("torch", "2", "1")


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.ones(2, 4).t(), "required to be contiguous"),
        (torch.ones(4, dtype=torch.complex64), "not supported"),
        (torch.eye(4).to_sparse(), "not supported"),
    ],
    ids=["view", "complex", "sparse"],
)
def test_tensors_that_cannot_be_sent_are_a_value_error(
    on_two: Everybody, tensor: torch.Tensor, told: str
) -> None:
    def act() -> None:
        calls: list[Callable[[torch.Tensor], Any]] = [
            hvd.allreduce,
            hvd.allreduce_,
            hvd.allgather_async,
            hvd.alltoall,
            hvd.reducescatter,
            lambda one: hvd.broadcast_(one, 0),
            lambda one: hvd.grouped_allreduce([one]),
            lambda one: hvd.grouped_allgather([one]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=told):
                call(tensor)

    on_two(act)


def test_what_horovods_core_alone_refuses_is_both_errors(on_two: Everybody) -> None:
    def act() -> None:
        for kind in (hvd.HorovodInternalError, ValueError):
            with pytest.raises(kind, match=r"hvd\.Average, hvd\.Sum"):
                hvd.reducescatter(torch.ones(2), op=hvd.Min)

    on_two(act)


@pytest.mark.parametrize("splits", [torch.tensor([1, 1]), torch.ones(2, 1, dtype=torch.int32)], ids=str)
def test_splits_are_int32_of_one_dimension(on_two: Everybody, splits: torch.Tensor) -> None:
    def act() -> None:
        with pytest.raises(ValueError, match=r"torch\.int32 with one dimension"):
            hvd.alltoall(torch.ones(2), splits)

    on_two(act)


def test_a_group_needs_a_tensor(on_two: Everybody) -> None:
    def act() -> None:
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with pytest.raises(ValueError, match="at least one"):
                call([])

    on_two(act)


def test_a_polled_result_is_in_place(on_two: Everybody) -> None:
    def act() -> list[float]:
        tensor = torch.full((2,), hvd.rank() + 1.0)
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        while not hvd.poll(handle):
            hvd.allreduce(torch.ones(1), name=f"pass the time {hvd.rank()}", process_set=alone())
        seen: list[float] = tensor.tolist()
        assert hvd.synchronize(handle) is tensor
        return seen

    def alone() -> hvd.ProcessSet:
        return own[hvd.rank()]

    own: dict[int, hvd.ProcessSet] = {}

    def prepared() -> list[float]:
        sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
        own[hvd.rank()] = sets[hvd.rank()]
        return act()

    assert on_two(prepared) == [[3, 3], [3, 3]]


def test_a_set_has_no_rank_for_those_outside_and_numbers_are_used_again(on_two: Everybody) -> None:
    def act() -> None:
        first, second = hvd.add_process_set([0]), hvd.add_process_set([1])
        assert (first.process_set_id, second.process_set_id) == (1, 2)
        with pytest.raises(ValueError, match="is not a member"):
            (first, second)[1 - hvd.rank()].rank()
        assert hvd.remove_process_set(first)
        assert hvd.add_process_set([0]).process_set_id == 1

    on_two(act)


def test_objects_of_local_classes_and_lambdas_are_sent(on_two: Everybody) -> None:
    class Local:
        value = 3

    def act() -> tuple[int, int]:
        twice = hvd.broadcast_object((lambda x: 2 * x) if hvd.rank() == 0 else None)
        return twice(4), hvd.allgather_object(Local())[1].value

    assert on_two(act) == [(8, 3)] * 2


def test_fresh_optimizers_have_zero_gradients_once_their_state_was_broadcast(on_two: Everybody) -> None:
    def act() -> None:
        frozen, dense = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
        hvd.broadcast_optimizer_state(torch.optim.SGD([frozen, dense], lr=0.1, momentum=0.9), root_rank=0)
        assert frozen.grad is None
        assert dense.grad is not None
        assert dense.grad.tolist() == [0, 0]
        table = nn.Embedding(4, 2, sparse=True)
        hvd.broadcast_optimizer_state(torch.optim.SGD(table.parameters(), lr=0.1), 0, model=table)
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        table(torch.tensor([1])).sum().backward()
        assert table.weight.grad.is_sparse

    on_two(act)


def test_an_optimizer_tells_what_it_was_given(on_two: Everybody) -> None:
    def act() -> None:
        layer = nn.Linear(1, 1)
        for op in (hvd.Sum, hvd.Adasum):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layer.parameters(), lr=0.1), backward_passes_per_step=2, op=op
            )
            assert (optimizer.op, optimizer.backward_passes_per_step) == (op, 2)
            optimizer.set_backward_passes_per_step(1)
            assert optimizer.backward_passes_per_step == 1
            assert optimizer.process_set is hvd.global_process_set

    on_two(act)


def test_a_memory_format_survives_training(on_two: Everybody) -> None:
    def act() -> list[float]:
        model = nn.utils.convert_conv2d_weight_memory_format(nn.Conv2d(2, 3, 2), torch.channels_last)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        model(
            torch.full((1, 2, 3, 3), hvd.rank() + 1.0).to(memory_format=torch.channels_last)
        ).sum().backward()
        optimizer.step()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        return model.weight.flatten().tolist()

    first, second = on_two(act)
    assert first == second


def test_parameters_may_be_frozen_and_freed_between_steps(on_two: Everybody) -> None:
    def act() -> None:
        models = [nn.Linear(2, 2), nn.Linear(2, 1)]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
            for model in models
        ]
        for turn in (0, 1, 0, 1):
            for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                model.requires_grad_(index == turn)
                optimizer.zero_grad()
            models[1](models[0](torch.ones(3, 2))).sum().backward()
            assert [model.weight.grad is None for model in models] == [turn == 1, turn == 0]
            optimizers[turn].step()

    on_two(act)


def test_an_object_state_brings_by_what_it_is_given(on_two: Everybody) -> None:
    def act() -> tuple[int, int]:
        state = ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, value=hvd.rank())
        other = ObjectState(lambda saved: {"value": saved["value"] + 10}, hvd.rank, value=hvd.rank())
        state.sync()
        other.sync()
        return state.value, other.value

    assert on_two(act) == [(0, 10), (0, 11)]


def test_the_short_name_shows_all_that_the_long_one_does() -> None:
    from hubring.horovod import elastic
    from hubring.workers import horovod

    assert elastic.run is horovod.elastic.run
    public = {
        name: value
        for name, value in vars(horovod).items()
        if not (name.startswith("_") or isinstance(value, ModuleType))
    }
    assert len(public) > 60
    assert {name: getattr(hvd, name) for name in public} == public
    assert hvd.__version__ == horovod.__version__
