"""torch's default process group, on Gloo or NCCL."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hubring.ps.core.errors import RingBroken
from hubring.workers.peers.interface import talk_through
from hubring.workers.peers.seat import Seat


def join(seat: Seat) -> None:
    """Joins the process group as a rank.

    Raises:
        RingBroken: The ranks could not connect.
    """
    talk_through(seat.host)
    try:
        dist.init_process_group(
            seat.backend,
            init_method=seat.init_method,
            rank=seat.rank,
            world_size=seat.size,
            timeout=timedelta(seconds=seat.timeout),
        )
    except (RuntimeError, ValueError) as cause:
        raise RingBroken(f"rank {seat.rank} could not join the others at {seat.meet}: {cause}") from cause
