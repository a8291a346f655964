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


def ring_rank(rank: int, folder: Path, told: Any, where: str) -> None:
    """Averages once; then rank 1 dies, and rank 0 tells what it met: in the exchange or at a barrier."""
    store = RingStore(FileNotes(folder), "ring", LIMIT)
    communicator = AllreduceCommunicator(rank, 2, store, host="127.0.0.1", timeout=LIMIT)
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
        told.put((type(error).__name__, str(error)))
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


@pytest.mark.slow
@pytest.mark.timeout(300)  # the processes import torch first
def test_a_killed_rank_is_noticed_at_once(forking: Any, tmp_path: Path) -> None:
    """By a rank in an exchange, and by one at a barrier."""
    lost = "failed because a member of the ring is lost"
    met = {
        "exchange": f"the exchange of bucket 0 {lost}",
        "barrier": f"agreeing on collectives {lost}",
    }
    for where, what in met.items():
        folder, told = tmp_path / where, forking.Queue()
        folder.mkdir()
        ranks = [forking.Process(target=ring_rank, args=(rank, folder, told, where)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        try:
            assert dict(told.get(timeout=60) for _ in ranks) == {rank: [0.5] * 8 for rank in (0, 1)}
            kind, text = told.get(timeout=LIMIT / 2)  # well before the ring's own timeout
            assert kind == "RingBroken"
            assert f"rank 0: {what}" in text
            ranks[0].join(LIMIT)
            assert ranks[0].exitcode == 0
        finally:
            for process in ranks:
                process.kill()
                process.join()
