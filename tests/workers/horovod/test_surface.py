"""What scripts touch, held against Horovod 0.28.1: names, arguments, what is refused and how."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest

import hubring.horovod as hvd
from hubring.workers.horovod.errors import HorovodVersionMismatchError
from hubring.workers.horovod.run_function import run

SCALED = "prescale_factor postscale_factor process_set"
REDUCED = f"average name op {SCALED}"
SCATTERED = "op process_set prescale_factor postscale_factor"
ARGUMENTS = {
    "init": "comm process_sets",
    "start_timeline": "file_path mark_cycles",
    "allreduce": f"tensor average name compression op {SCALED}",
    "allreduce_ allreduce_async allreduce_async_": f"tensor {REDUCED}",
    "grouped_allreduce": f"tensors average name compression op {SCALED}",
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_": f"tensors {REDUCED}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather allgather_async": "tensor name process_set",
    "grouped_allgather grouped_allgather_async": "tensors name process_set",
    "broadcast broadcast_ broadcast_async broadcast_async_": "tensor root_rank name process_set",
    "alltoall alltoall_async": "tensor splits name process_set",
    "reducescatter": f"tensor name compression {SCATTERED}",
    "reducescatter_async": f"tensor name {SCATTERED}",
    "grouped_reducescatter": f"tensors name compression {SCATTERED}",
    "grouped_reducescatter_async": f"tensors name {SCATTERED}",
    "join": "device",
    "barrier": "process_set",
    "poll synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op"
    " gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    "ProcessSet": "ranks_or_comm",
    "add_process_set remove_process_set": "process_set",
}
"""Horovod's arguments by the functions that have them."""
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


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, told) for names, told in ARGUMENTS.items() for name in names.split()]
)
def test_arguments_have_horovods_names_order_and_defaults(name: str, arguments: str) -> None:
    function = getattr(hvd, name)
    assert getattr(sys.modules[function.__module__], function.__qualname__) is function, "pickle finds it"
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(arguments.split())] == arguments.split()
    for argument in arguments.split():
        default = parameters[argument].default
        if default is not inspect.Parameter.empty and argument in DEFAULTS:
            assert default is DEFAULTS[argument] or default == DEFAULTS[argument]


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


def test_errors_may_be_caught_by_horovods_bases() -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(HorovodVersionMismatchError, ImportError)
    error = HorovodVersionMismatchError("torch", "2", "1")
    assert (error.name, error.version, error.installed_version) == ("torch", "2", "1")


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
