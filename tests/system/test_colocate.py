"""A hub whose shards are its workers' (`--colocate`): it trains as any hub, and ends as a whole."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hubring.ps.transport.host import reachable
from tests.support.processes.cluster import SMALL, Cluster, Program
from tests.support.processes.process_tree import GRACE, ends_by, left_behind, shared_memory

pytestmark = pytest.mark.slow

SLICES = ["--slice-bytes", "128"]  # so that the small model has some for everybody


def shard_of(worker: Program) -> int:
    (shard,) = worker.children("hubring.ps.shard.process")
    return shard


@pytest.mark.parametrize(
    "flags", [[], pytest.param(["--transport", "zmq"], marks=pytest.mark.full)], ids=["shm", "zmq"]
)
def test_a_colocated_hub_ends_in_the_same_bytes_as_a_hub_with_own_shards(
    cluster: Cluster, tmp_path: Path, flags: list[str]
) -> None:
    before, trained = shared_memory(), []
    for name, kind in (("own", []), ("colocated", ["--colocate"])):
        server, address = cluster.server("--workers", "2", "--once", *SLICES, *kind, name=name)
        final = tmp_path / f"{name}.safetensors"
        arguments = [*flags, "--save-parameters", str(final), SMALL, "60"]
        assert [worker.done()["steps"] for worker in cluster.ranks(address, 2, *arguments)] == [60, 60]
        summary = server.done()
        trained.append(load_file(final))
    assert [shard["pushes"] > 0 for shard in summary["shards"]] == [True, True]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    assert not left_behind(before)


def test_a_killed_worker_ends_the_job_and_the_next_goes_on_from_its_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    flags = ["--mode", "asp", "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "0.01"]
    server, address = cluster.server("--workers", "2", "--colocate", "--lease", "5", *SLICES, *flags)
    # Workers that train send their states for a checkpoint at once; for those that hold it waits.
    pair = cluster.ranks(address, 2, SMALL, "1000000", "16", "pace", "0.02")
    server.until_said("checkpoint of step")
    shards = [shard_of(worker) for worker in pair]
    told = cluster.run("status", "hubring.ps.cli", "status", address).done()["shards"]
    assert [(shard["shard"], shard["pid"]) for shard in told] == list(enumerate(shards))
    assert all(shard["host"] for shard in told)
    pair[1].process.kill()
    assert ends_by(shards[1], time.monotonic() + GRACE)
    error = pair[0].done(69, timeout=15)["error"]
    assert "rank 1" in error
    # Both leases run out at once: whichever is looked at first.
    assert (
        "the job cannot continue without its shard" in error or "its part of the parameters is lost" in error
    )
    server.until_said("ready for the next job")
    assert all(ends_by(shard, time.monotonic() + GRACE) for shard in shards)
    saved = int(re.findall(r"checkpoint of step (\d+)", server.said())[-1])
    record, last = tmp_path / "record.jsonl", saved + 100
    recorder = cluster.worker(address, "--rank", "0", "--record", str(record), SMALL, str(last))
    other = cluster.worker(address, "--rank", "1", SMALL, str(last))
    assert recorder.done()["steps"] == other.done()["steps"] == last
    # Each worker goes on at its own step, and the checkpoint's is that of the slowest.
    assert saved < json.loads(record.read_text().splitlines()[0])["step"] <= last


ENDS_LATE = """
import sys, time
from pathlib import Path
import hubring
from tests.support.scripts import small

go = Path(sys.argv.pop(1))
small.main()
while hubring.rank() and not go.exists():
    time.sleep(0.02)
"""


@pytest.mark.parametrize("saves", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_shard_of_a_finished_worker_that_is_killed_is_missed_only_where_it_is_needed(
    cluster: Cluster, tmp_path: Path, saves: bool
) -> None:
    script, flags = tmp_path / "late.py", ["--checkpoint-dir", str(tmp_path / "saved")] if saves else []
    script.write_text(ENDS_LATE)
    server, address = cluster.server("--workers", "3", "--once", "--colocate", *SLICES, *flags)
    first, *others = cluster.ranks(address, 3, str(script), str(cluster.go), "5")
    first.until_said("training has finished")
    first.process.kill()
    server.until_said(
        "which other workers or the last checkpoint still need" if saves else "ended with its worker"
    )
    cluster.go.touch()
    for other in others:
        assert other.done(69 if saves else 0)["steps"] == 5
    server.done(69 if saves else 0)


@pytest.mark.full
def test_a_killed_server_leaves_neither_workers_nor_shards(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "2", "--colocate", *SLICES)
    pair = cluster.ranks(address, 2, SMALL, "1000000")
    server.until(lambda: cluster.step(address) > 5, "a step")
    server.process.kill()
    for worker in pair:
        assert address in worker.done(69, timeout=20)["error"]


def test_a_failing_script_ends_the_job_for_all(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--colocate", *SLICES)
    broken = tmp_path / "small.py"  # another script of the same name: the same job
    broken.write_text(Path(SMALL).read_text().replace("loss.backward()", "loss.backward(); 1 / (step < 10)"))
    good, bad = (
        cluster.worker(address, "--rank", str(rank), script, "60")
        for rank, script in enumerate((SMALL, str(broken)))
    )
    assert "ZeroDivisionError" in bad.done(1)["error"]
    error = good.done(69)["error"]
    assert "rank 1" in error
    assert "failed: ZeroDivisionError" in error
    server.done(1)


@pytest.mark.full
def test_one_job_follows_the_other_with_shards_of_its_own(cluster: Cluster) -> None:
    """A hub that steps, one that averages, and a ring, which has no shards."""
    server, address = cluster.server("--colocate", *SLICES, "--host", "::1")
    for number, kind in enumerate((["hub"], ["hub", "--aggregate"], ["ring"])):
        count = 2 + number
        workers = cluster.ranks(address, count, "--world-size", str(count), "--topology", *kind, SMALL, "10")
        assert {worker.done()["steps"] for worker in workers} == {10}
        assert {"starts one on ::1" in worker.said() for worker in workers} == {kind != ["ring"]}
        server.until(lambda: server.said().count("ready for the next job") == number + 1, "the job's end")  # noqa: B023
    assert server.said().count("shard 0 (") == 2


@pytest.mark.full
def test_ctrl_c_saves_and_another_number_of_workers_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    common = ["--once", "--colocate", "--checkpoint-dir", str(tmp_path / "saved"), *SLICES]
    server, address = cluster.server("--workers", "2", *common, name="first")
    pair = cluster.held(address, steps=1_000_000)
    server.process.send_signal(signal.SIGINT)
    server.until_said("SIGINT")
    cluster.go.touch()
    steps = {worker.done(75)["steps"] for worker in pair}
    assert len(steps) == 1, "the workers left after different steps"
    last = steps.pop() + 40
    assert server.done(130)["checkpoint"].endswith(f"-step-{last - 40}")
    server, address = cluster.server("--workers", "3", *common, name="second")
    server.until_said("resumes   step")
    assert {worker.done()["steps"] for worker in cluster.ranks(address, 3, SMALL, str(last))} == {last}
    assert len(server.done()["shards"]) == 3


def test_a_worker_that_is_asked_to_stop_stops_all_after_the_same_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    server, address = cluster.server("--workers", "2", "--once", "--colocate", *saved, *SLICES)
    pair = cluster.ranks(address, 2, SMALL, "1000000")
    server.until(lambda: cluster.step(address) > 5, "a step")
    pair[1].process.send_signal(signal.SIGINT)
    steps = {pair[0].done(75)["steps"], pair[1].done(130)["steps"]}
    assert len(steps) == 1, "the workers left after different steps"
    assert server.done(75)["checkpoint"].endswith(f"-step-{steps.pop()}")


@pytest.mark.full
def test_the_second_signal_does_not_wait_for_the_others(cluster: Cluster) -> None:
    server, quick, slow = one_done_first(cluster)
    quick.process.send_signal(signal.SIGINT)
    quick.done(130, timeout=15)
    cluster.go.touch()
    assert "shard 0" in slow.done(69, timeout=20)["error"]
    server.done(69)


def test_the_first_worker_done_serves_the_others_until_the_end(cluster: Cluster) -> None:
    """Beyond loopback too."""
    server, quick, slow = one_done_first(cluster, "--host", "0.0.0.0")
    cluster.go.touch()
    assert [worker.done()["steps"] for worker in (quick, slow)] == [60, 60]
    assert server.done()["finished"] == [0, 1]
    for worker in (quick, slow):
        assert f"starts one on {reachable('0.0.0.0')}" in worker.said()
        assert "reconnecting" not in worker.said()


def one_done_first(cluster: Cluster, *flags: str) -> tuple[Program, Program, Program]:
    """A server, a worker that has finished, and one that holds until `cluster.go` is there."""
    where = ["--colocate", "--mode", "asp", *SLICES, *flags]
    server, address = cluster.server("--workers", "2", "--once", *where)
    quick = cluster.worker(address, "--rank", "0", SMALL, "60")
    slow = cluster.worker(address, "--rank", "1", SMALL, "60", "16", "hold", str(cluster.go), "20")
    quick.until_said("still serves rank 1")
    return server, quick, slow
