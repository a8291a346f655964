"""The processes of a server, by what they do."""

from __future__ import annotations

from tests.support.processes.cluster import Cluster
from tests.support.processes.process_tree import coordinators


def server_processes(cluster: Cluster, address: str) -> dict[str, int]:
    """Returns the process ids of shards and their standbys, as far as they are there.

    With `--standby`, those of the coordinator and its standby too; without, the coordinator is in the program
    itself.
    """
    found: dict[str, int] = {}
    for row in cluster.status(address)["shards"]:
        found[f"shard {row['shard']}"] = row["pid"]
        if row["standby"] is not None:
            found[f"standby of shard {row['shard']}"] = row["standby"]["pid"]
    found.update(zip(("coordinator", "standby of coordinator"), coordinators(), strict=False))
    return found
