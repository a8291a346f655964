"""What stands on no communicator: hosts, buckets, aliases, variables, the launcher's reading of hosts."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hubring.horovod as hvd
from hubring.ps.core.errors import UsageError
from hubring.workers.horovod import alias
from hubring.workers.horovod.optimizer.gradient_group import pack
from hubring.workers.horovod.world.build import check_build, split_list
from hubring.workers.horovod.world.hosts import Neighbourhood, neighbourhood
from hubring.workers.horovod.world.variables import variables
from hubring.workers.localrun import host
from hubring.workers.programs.ps_run import app


def test_local_and_cross_ranks_count_hosts_as_horovod_does() -> None:
    hosts = ["a", "a", "b", "a", "b", "c"]
    assert neighbourhood(3, hosts) == Neighbourhood(2, 3, 0, 1, is_homogeneous=False)
    assert neighbourhood(4, hosts) == Neighbourhood(1, 2, 1, 2, is_homogeneous=False)
    assert neighbourhood(5, hosts) == Neighbourhood(0, 1, 2, 3, is_homogeneous=False)
    assert neighbourhood(1, ["a", "b", "a", "b"]) == Neighbourhood(0, 2, 1, 2)


def test_variables_are_those_of_horovodrun() -> None:
    assert variables(3, 4, Neighbourhood(1, 2, 1, 2)) == {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }


def test_buckets_fill_in_the_order_of_backward() -> None:
    names = {torch.zeros(count): f"p{count}" for count in (1, 2, 3, 4)}
    filled = [[len(one) for one in bucket.parameters] for bucket in pack(names, None, 5 * 4)]
    assert filled == [[4], [3, 2], [1]]
    assert [bucket.name for bucket in pack(names, None, 5 * 4)] == ["p4", "p3..p2", "p1"]
    assert [[len(one) for one in bucket.parameters] for bucket in pack(names, 3, 0)] == [[4, 3], [2], [1]]
    assert len(pack(names, 9, 0)) == 4
    one, *_, last = names
    listed = [[len(one) for one in bucket.parameters] for bucket in pack(names, [[one, last]], 0)]
    assert listed == [[1, 4], [3], [2]]


def test_lists_are_split_as_evenly_as_can_be() -> None:
    assert split_list(list(range(5)), 3) == [[0, 1], [2, 3], [4]]
    assert split_list([1], 3) == [[1], [], []]


@pytest.fixture
def horovod() -> Iterator[None]:
    """Horovod's names in this process, put away afterwards."""
    finders = list(sys.meta_path)
    alias.install()
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.mark.usefixtures("horovod")
def test_horovods_modules_show_these_very_objects() -> None:
    theirs = importlib.import_module("horovod.torch")
    assert theirs.allreduce is hvd.allreduce
    assert theirs.elastic.TorchState is hvd.elastic.TorchState
    assert theirs.__version__ == importlib.import_module("horovod").__version__ == "0.28.1"
    assert importlib.import_module("horovod.torch.compression").Compression is hvd.Compression
    assert importlib.import_module("horovod.torch.elastic").run is hvd.elastic.run
    assert importlib.import_module("horovod.torch.mpi_ops").Average == hvd.Average
    assert importlib.import_module("horovod.common.util").gloo_built() is hvd.gloo_built()
    exceptions = importlib.import_module("horovod.common.exceptions")
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert issubclass(exceptions.HostsUpdatedInterrupt, RuntimeError)
    assert callable(importlib.import_module("horovod").run)


NAMES = {
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
    "horovod.runner.common.util.hosts": "get_host_assignments parse_hosts HostInfo SlotInfo",
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
def test_horovod_torch_brings_its_modules() -> None:
    theirs = importlib.import_module("horovod.torch")
    assert theirs.mpi_ops.Sum == hvd.mpi_ops.Sum == hvd.Sum
    assert theirs.optimizer._DistributedOptimizer is hvd.optimizer._DistributedOptimizer
    assert theirs.optimizer is importlib.import_module("horovod.torch.optimizer")
    assert theirs.elastic.state is importlib.import_module("horovod.torch.elastic.state")
    assert not hasattr(importlib.import_module("horovod.torch.functions"), "annotations")


@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize("name", alias.VIEWS)
def test_every_view_can_be_imported(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


@pytest.mark.usefixtures("horovod")
def test_other_frameworks_are_said_to_be_missing() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"Hubring has no horovod\.tensorflow; expected one of horovod"
    ):
        importlib.import_module("horovod.tensorflow")


def test_check_build_lays_out_what_there_is() -> None:
    lines = check_build().splitlines()
    assert "    [X] PyTorch" in lines
    assert "    [ ] MPI" in lines
    assert "    [X] Hub" in lines


def test_ps_run_too_ends_in_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        app(["-np", "2", "nosuch.py"], standalone_mode=False)
    told = capsys.readouterr()
    assert told.err.startswith("ps-run: script nosuch.py does not exist")
    assert json.loads(told.out) == {"error": told.err.strip().removeprefix("ps-run: "), "exit_code": 2}


def test_hosts_are_this_machine_alone(tmp_path: Path) -> None:
    assert host.room(None, None, None) is None
    assert host.room("localhost:4", None, None) == 4
    assert host.room("localhost,127.0.0.1:2", None, None, default=3) == 5
    with pytest.raises(
        UsageError, match=r"'node7' is another machine.*srun, torchrun, mpirun, or Kubernetes"
    ):
        host.room("localhost:2,node7:2", None, None)
    with pytest.raises(UsageError, match="expected HOST:SLOTS"):
        host.room("localhost:many", None, None)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# mine\nlocalhost slots=3\n")
    assert host.room(None, hostfile, None) == 3
    with pytest.raises(UsageError, match="the file does not exist"):
        host.room(None, tmp_path / "none", None)
    with pytest.raises(UsageError, match="--hosts and --hostfile both set the hosts"):
        host.room("localhost", hostfile, None)
