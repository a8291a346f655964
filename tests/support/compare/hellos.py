"""First messages of the tasks of a cluster."""

from __future__ import annotations

from typing import Any

from hubring.workers.compare.cluster.messages import Hello
from hubring.workers.compare.cluster.spread import Spread


def hello(rank: int, host: str, **told: Any) -> Hello:
    machine = {"processor": "an abacus", "cores": 4, "system": "Linux", "hubring": "1", "torch": "2"}
    usual: dict[str, Any] = {
        "boot": f"boot of {host}",
        "idle": True,
        "size": 4,
        "local_rank": rank % 2,
        "address": f"address of {host}",
        "cores": (0, 1, 2, 3),
    }
    return Hello(rank=rank, host=host, **(usual | {"machine": machine} | told))


TWO = Spread([hello(0, "a"), hello(1, "a"), hello(2, "b"), hello(3, "b")], "slurm")
"""Two machines with two tasks each."""
