"""Ranks that are processes meet, leave, and notice who was killed."""

from __future__ import annotations

import os
import signal
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from torch import multiprocessing

from hubring.ps.core.errors import HubringError
from hubring.workers.collectives import barrier
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.group import RingStore
from tests.contract.models import attached
from tests.support.training.notes import FileNotes
from tests.support.training.ranks import LIMIT


def ring_rank(rank: int, folder: Path, told: Any, where: str, hosts: str) -> None:
    """Averages once; then rank 1 dies, and the others tell what they met: in the exchange or at a barrier.

    `hosts` has a letter for each rank's host, if the ranks of a host exchange among themselves first.
    """
    store = RingStore(FileNotes(folder), "ring", LIMIT)
    communicator = AllreduceCommunicator(
        rank, len(hosts) or 2, store, host="127.0.0.1", timeout=LIMIT, local=hosts[rank : rank + 1]
    )
    (bucket,) = attached(communicator, bucket_bytes=1 << 20)
    bucket.gradients.fill_(rank)
    communicator.push_pull(bucket, {}).wait(LIMIT)
    told.put((rank, bucket.gradients.tolist()))
    if rank == 1:
        told.close()
        told.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if where == "barrier":
            barrier(communicator=communicator)
        communicator.push_pull(bucket, {}).wait(LIMIT)
    except HubringError as error:
        told.put((rank, f"{type(error).__name__}: {error}"))
    communicator.close(finished=False)
    told.close()
    told.join_thread()
    # As workers end: threads that a broken ring leaves in torch may abort whoever ends in good order.
    os._exit(0)


@pytest.fixture(scope="session")
def forking() -> Any:
    """Starts processes that have imported torch; what forks them stays as long as this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    forkserver.ensure_running()
    return context


def tell_of_a_kill(forking: Any, folder: Path, where: str, hosts: str = "") -> dict[int, str]:
    """Runs ranks of which rank 1 is killed; returns what the others tell, well before the ring's timeout."""
    folder.mkdir()
    told = forking.Queue()
    given = folder, told, where, hosts
    ranks = [forking.Process(target=ring_rank, args=(rank, *given)) for rank in range(len(hosts) or 2)]
    for process in ranks:
        process.start()
    try:
        came = [told.get(timeout=60) for _ in ranks] + [told.get(timeout=LIMIT / 2) for _ in ranks[1:]]
        means = {rank: what for rank, what in came if isinstance(what, list)}
        assert means == dict.fromkeys(range(len(ranks)), [(len(ranks) - 1) / 2] * 8)
        for rank, process in enumerate(ranks):
            process.join(LIMIT)
            assert process.exitcode == (-signal.SIGKILL if rank == 1 else 0)
        return {rank: what for rank, what in came if isinstance(what, str)}
    finally:
        for process in ranks:
            process.kill()
            process.join()


LOST = "failed because a member of the ring is lost"


@pytest.mark.slow
@pytest.mark.timeout(300)  # the processes import torch first
def test_a_killed_rank_is_noticed_at_once(forking: Any, tmp_path: Path) -> None:
    """By a rank in an exchange, and by one at a barrier."""
    met = {"exchange": "the exchange of bucket 0", "barrier": "agreeing on collectives"}
    for where, what in met.items():
        told = tell_of_a_kill(forking, tmp_path / where, where)
        assert f"RingBroken: rank 0: {what} {LOST}" in told[0]


@pytest.mark.slow
@pytest.mark.timeout(300)  # the processes import torch first
def test_a_killed_rank_is_named_on_its_host_and_noticed_on_the_others(forking: Any, tmp_path: Path) -> None:
    told = tell_of_a_kill(forking, tmp_path / "ranks", "exchange", "AABB")
    assert f"rank 0: the exchange of bucket 0 {LOST}: rank 1 is lost" in told[0]
    assert all(f"rank {rank}: the exchange of bucket 0 {LOST}" in told[rank] for rank in (2, 3))
