"""Ray: it places the hub, as an actor, and the workers, as tasks; `ps-server` and `ps-worker` run there.

    ray.init()
    results = on_ray.train(["train.py", "--epochs", "3"], workers=4, worker=["--topology", "ring"])

The workers hear from the actor where the server listens. Whoever reaches that address
may change the model, as everywhere beyond loopback; a cluster of Ray's is a trusted one.
Script and package have to be on every node, as for any function of Ray's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import UsageError
from hubring.ps.process.children import Children
from hubring.ps.process.command import module_command
from hubring.workers.localrun.server import Server
from hubring.workers.programs.node_launcher import PARENT, Worker


def train(
    script: Sequence[str],
    *,
    workers: int,
    server: Sequence[str] = (),
    worker: Sequence[str] = (),
    cpus: float = 1,
    gpus: float = 0,
) -> list[dict[str, Any]]:
    """Trains in the cluster of Ray's that this process is connected to.

    Args:
        script: The script and its arguments; empty: the job that ships.
        workers: How many there are.
        server: More flags of `ps-server start`.
        worker: More flags of `ps-worker`.
        cpus: What Ray keeps for each worker, in cores.
        gpus: And in GPUs.

    Returns:
        The last line of each worker, by rank. One that Ray lost has `error` and an `exit_code` of 1: on a hub
        the others go on.

    Raises:
        UsageError: Ray is not installed, or its cluster too small for all workers at once.
    """
    if find_spec("ray") is None:
        raise UsageError("ray is not installed (pip install 'hubring[ray]')")
    import ray

    if not ray.is_initialized():
        ray.init()  # as the first remote call would
    _check_room(ray.cluster_resources(), workers, {"CPU": cpus, "GPU": gpus})
    # It waits more than it works: a core of its own would be one worker's.
    hub = ray.remote(Hub).options(num_cpus=0).remote(workers, list(server))
    try:
        address = ray.get(hub.address.remote())
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(work)
        words = [
            ["--server", address, "--rank", str(rank), *worker, "--", *script] for rank in range(workers)
        ]
        results = [_result(started) for started in [task.remote(each) for each in words]]
        # A job that began ends by itself, once its last checkpoint is written; one that did not waits on.
        ray.get(hub.end.remote(None if any("rank" in one for one in results) else 0.0))
        return results
    finally:
        ray.kill(hub)


def _check_room(has: Mapping[str, float], workers: int, each: Mapping[str, float]) -> None:
    """A job begins once all are there: one for whom Ray has no room would keep the others waiting."""
    for kind, wanted in each.items():
        need, there = workers * wanted, has.get(kind, 0.0)
        if need > there:
            raise UsageError(
                f"{workers} workers of {wanted:g} {kind} each need {need:g}, but Ray's cluster has {there:g}:"
                f" give fewer workers or a smaller {kind.lower()}s=, or add nodes first"
            )


class Hub:
    """A server, on whichever node Ray runs this actor.

    Args:
        workers: How many it is to wait for.
        flags: More for `ps-server start`.
    """

    def __init__(self, workers: int, flags: Sequence[str]) -> None:
        from ray.util import get_node_ip_address

        here = ["--host", get_node_ip_address(), "--insecure"]
        self._server = Server(workers, [*here, *flags], environment(), verbose=True)

    def address(self) -> str:
        """Where it listens."""
        return self._server.address

    def end(self, patience: float | None) -> None:
        """Waits so many seconds (None: as long as it takes) for its end, and then makes it end."""
        self._server.end(patience)


def work(words: Sequence[str]) -> dict[str, Any]:
    """Runs one worker on this node; returns its last line."""
    variables = {**environment(), PARENT: str(os.getpid())}
    with Children[Worker]() as started:
        worker = started.add(
            Worker("the worker", module_command("hubring.workers.programs.ps_worker", *words), variables)
        )
        result, code = worker.result(), worker.exit_code()
    if worker.code != code:  # a signal ended it
        return {"error": worker.ended, "exit_code": code}
    return result or {"error": f"{worker.ended} and no result; its log says why", "exit_code": code or 1}


def _result(started: Any) -> dict[str, Any]:
    import ray

    try:
        result: dict[str, Any] = ray.get(started)
    except ray.exceptions.RayError as lost:
        return {"error": str(lost), "exit_code": 1}
    return result
