"""Rings of threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.ring.process_group import Ring
from tests.support.training.ranks import LIMIT

CPU = torch.device("cpu")


def on_threads(size: int, action: Callable[[int], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(action, rank) for rank in range(size)]


def ring_of(rank: int, store: RingStore, size: int = 2) -> Ring:
    """Opens a ring that can be aborted."""
    return Ring(
        rank, size, store, backend="gloo", device=CPU, host="127.0.0.1", timeout=LIMIT, abortable=True
    )
