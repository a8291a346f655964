"""What Horovod's launcher tells its processes by the environment."""

from __future__ import annotations

from hubring.workers.horovod.world.hosts import Neighbourhood


def variables(rank: int, size: int, around: Neighbourhood) -> dict[str, str]:
    """HOROVOD_RANK and the rest, as `horovodrun` sets them."""
    numbers = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": around.local_rank,
        "LOCAL_SIZE": around.local_size,
        "CROSS_RANK": around.cross_rank,
        "CROSS_SIZE": around.cross_size,
    }
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
