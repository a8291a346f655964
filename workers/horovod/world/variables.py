"""The environment variables that Horovod's launcher sets."""

from __future__ import annotations

from hubring.workers.horovod.world.hosts import Neighbourhood


def variables(rank: int, size: int, around: Neighbourhood) -> dict[str, str]:
    """Returns HOROVOD_RANK and the like, as `horovodrun` sets them."""
    numbers = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": around.local_rank,
        "LOCAL_SIZE": around.local_size,
        "CROSS_RANK": around.cross_rank,
        "CROSS_SIZE": around.cross_size,
    }
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
