"""The modules of `horovod.runner.common.util`, and the helpers of `horovod.common`."""

from __future__ import annotations

from pathlib import Path

import pytest

import hubring.horovod as hvd
from hubring.workers.horovod.runner.util import codec, env, host_hash, hosts, secret, timeout
from hubring.workers.horovod.world.basics import HorovodBasics
from hubring.workers.horovod.world.build import (
    get_average_backwards_compatibility_fun,
    is_version_greater_equal_than,
)
from tests.workers.horovod.conftest import Everybody

RANKS = [
    f"{launcher}_{word}" for launcher in ("HOROVOD", "OMPI_COMM_WORLD", "PMI") for word in ("RANK", "SIZE")
]


def test_hosts_get_ranks_in_order() -> None:
    given = hosts.parse_hosts("a:2,b:3")
    assert hosts.parse_hosts_and_slots("a:2, b:3") == (["a", "b"], {"a": 2, "b": 3})
    slots = hosts.get_host_assignments(given, 3, 4)
    assert [slot.to_response_string() for slot in slots] == [
        "0,4,0,2,0,2",
        "1,4,1,2,0,2",
        "2,4,0,2,1,2",
        "3,4,1,2,1,2",
    ]
    assert [slot.hostname for slot in slots] == ["a", "a", "b", "b"]
    assert len(hosts.get_host_assignments(given, 1)) == 5
    with pytest.raises(ValueError, match="6 processes need as many slots, but the hosts have 5"):
        hosts.get_host_assignments(given, 6)
    with pytest.raises(ValueError, match="'b': expected HOST:SLOTS"):
        hosts.parse_hosts("a:1,b")


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n\nb slots=1\n")
    assert hosts.parse_host_files(path) == "a:2,b:1"


def test_rank_and_size_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "3")
    with pytest.raises(RuntimeError, match="only one of PMI_RANK and PMI_SIZE"):
        env.get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "4")
    assert env.get_env_rank_and_size() == (3, 4)
    assert [env.is_exportable(name) for name in ("PATH", "OLDPWD", "MY_CUDA_VISIBLE_DEVICES")] == [
        True,
        False,
        False,
    ]
    assert not env.is_kubeflow_mpi()


def test_objects_signatures_and_host_names() -> None:
    assert codec.loads_base64(codec.dumps_base64({"a": [1]})) == {"a": [1]}
    assert isinstance(codec.dumps_base64(1, to_ascii=False), bytes)
    key = secret.make_secret_key()
    digest = secret.compute_digest(key, b"message")
    assert (len(key), len(digest)) == (secret.SECRET_LENGTH, secret.DIGEST_LENGTH)
    assert secret.check_digest(key, b"message", digest)
    assert not secret.check_digest(key, b"another", digest)
    assert host_hash.host_hash() == host_hash.host_hash()
    assert host_hash.host_hash("salt") != host_hash.host_hash()


def test_a_timeout_names_the_activity() -> None:
    over = timeout.Timeout(-1, "Timed out waiting for {activity}.")
    assert over.timed_out()
    assert over.remaining() == 0
    with pytest.raises(timeout.TimeoutException, match=r"waiting for hosts\. Timeout after -1 seconds\."):
        over.check_time_out_for("hosts")
    timeout.Timeout(1e6, "").check_time_out_for("anything")


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


def test_basics_show_the_world(on_two: Everybody) -> None:
    def act() -> None:
        basics = HorovodBasics("horovod/torch/mpi_ops.py", "mpi_lib_v2")
        assert (basics.rank(), basics.size(), basics.Adasum) == (hvd.rank(), 2, hvd.Adasum)
        assert basics.is_initialized()
        some = hvd.add_process_set([1])
        assert basics._get_process_set_ids_and_ranks() == {0: [0, 1], 1: [1]}
        hvd.remove_process_set(some)
        assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1]}

    on_two(act)
