"""Hosts, buckets, the names of Horovod's modules, and the helpers of `horovod.common`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch

import hubring.horovod as hvd
from hubring.workers.horovod import alias
from hubring.workers.horovod.basics import (
    HorovodBasics,
    check_build,
    get_average_backwards_compatibility_fun,
    is_version_greater_equal_than,
)
from hubring.workers.horovod.world import Neighbourhood, neighbourhood, variables
from tests.workers.horovod.conftest import every_rank


def test_local_and_cross_ranks_count_hosts_as_horovod_does() -> None:
    hosts = ["a", "a", "b", "a", "b", "c"]
    assert neighbourhood(3, hosts) == Neighbourhood(2, 3, 0, 1, is_homogeneous=False)
    assert neighbourhood(4, hosts) == Neighbourhood(1, 2, 1, 2, is_homogeneous=False)
    assert neighbourhood(5, hosts) == Neighbourhood(0, 1, 2, 3, is_homogeneous=False)
    assert neighbourhood(1, ["a", "b", "a", "b"]) == Neighbourhood(0, 2, 1, 2)


def test_variables_are_those_of_horovodrun() -> None:
    said = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2}
    expected = {f"HOROVOD_{name}": str(number) for name, number in said.items()}
    assert variables(3, 4, Neighbourhood(1, 2, 1, 2)) == expected


@pytest.fixture
def horovod() -> Iterator[None]:
    """Horovod's names in this process, put away afterwards."""
    finders = list(sys.meta_path)
    alias.install()
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


NAMES = {
    "horovod": "run __version__",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
    "horovod.torch": "check_extension mpi_ops functions optimizer compression elastic sync_batch_norm",
    "horovod.torch.mpi_ops": "gpu_available num_rank_is_power_2 check_installed_version Compression _basics"
    " handle_average_backwards_compatibility HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather"
    " HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall HorovodReducescatter"
    " HorovodGroupedReducescatter is_homogeneous rank Sum ProcessSet",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "horovod.torch.elastic": "TorchState ElasticSampler run state sampler",
    "horovod.torch.elastic.state": "TorchState StateHandler ModelStateHandler OptimizerStateHandler"
    " SamplerStateHandler get_handler_registry set_handler_registry",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.elastic": "State ObjectState run_fn notification_manager",
    "horovod.common.util": "is_version_greater_equal_than get_average_backwards_compatibility_fun split_list"
    " check_extension extension_available gpu_available nccl_built num_rank_is_power_2 env is_iterable",
    "horovod.runner.elastic.worker": "HostUpdateResult WorkerNotificationManager",
}


@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize("name", NAMES)
def test_modules_have_the_names_that_scripts_import(name: str) -> None:
    module = importlib.import_module(name)
    assert [one for one in NAMES[name].split() if not hasattr(module, one)] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("horovod.torch")])
def test_a_script_that_imports_hubring_horovod_has_the_same_names(name: str) -> None:
    module = importlib.import_module("hubring.horovod")
    for part in name.split(".")[2:]:
        module = getattr(module, part)
    assert [one for one in NAMES[name].split() if not hasattr(module, one)] == []


@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize("name", [name for name in alias.VIEWS if "keras" not in name])
def test_every_view_can_be_imported(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


@pytest.mark.usefixtures("horovod")
def test_other_frameworks_are_said_to_be_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"Hubring has no horovod\.mxnet; expected one of horovod"):
        importlib.import_module("horovod.mxnet")
    graphs = importlib.import_module("horovod.tensorflow")
    with pytest.raises(AttributeError, match=r"no horovod\.tensorflow\.init, .* trains Keras 3 on torch"):
        graphs.init()


def test_check_build_lays_out_what_there_is() -> None:
    there = {"PyTorch": True, "Hub": True} | dict.fromkeys(
        ["TensorFlow", "MXNet", "MPI", "DDL", "CCL"], False
    )
    there |= {name: getattr(torch.distributed, f"is_{name.lower()}_available")() for name in ("Gloo", "NCCL")}
    lines = [line for line in check_build().splitlines() if line.startswith("    [")]
    assert {(line[8:], line[5] == "X") for line in lines} == set(there.items())


def test_versions_are_compared_as_numbers() -> None:
    assert is_version_greater_equal_than("2.10.0", "2.9.0")
    assert not is_version_greater_equal_than("1.9.1", "1.10.0")
    for wrong in [("2.1.0", "2.1"), (2, "2.1.0")]:
        with pytest.raises(ValueError, match=r"major\.minor\.patch"):
            is_version_greater_equal_than(*wrong)  # type: ignore[arg-type]


def test_the_older_average_is_translated() -> None:
    chosen = get_average_backwards_compatibility_fun(HorovodBasics)
    assert [chosen(None, None), chosen(hvd.Max, None)] == [hvd.Average, hvd.Max]
    with pytest.warns(DeprecationWarning, match="average="):
        assert chosen(None, False) == hvd.Sum
    with pytest.raises(ValueError, match="supersedes average"):
        chosen(hvd.Sum, True)


@every_rank
def test_basics_show_the_world() -> None:
    basics = HorovodBasics("horovod/torch/mpi_ops.py", "mpi_lib_v2")
    assert (basics.rank(), basics.size(), basics.Adasum) == (hvd.rank(), 2, hvd.Adasum)
    assert basics.is_initialized()
    some = hvd.add_process_set([1])
    assert basics._get_process_set_ids_and_ranks() == {0: [0, 1], 1: [1]}
    hvd.remove_process_set(some)
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1]}
