"""Trains on a Ray cluster: Ray runs `ps-server` in an actor, and each `ps-worker` in a task.

    ray.init()
    results = on_ray.train(["train.py", "--epochs", "3"], workers=4, worker=["--topology", "ring"])

The actor gives the workers the server's address and their token, which Ray carries; Ray encrypts that only
with `RAY_USE_TLS`. The script and this package must be installed on every node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import UsageError
from hubring.ps.core.packages import require
from hubring.ps.process.child import Children
from hubring.ps.process.launch import PARENT_VARIABLE, module_command
from hubring.ps.process.output import SharedScreen
from hubring.ps.security import private_file, token_file
from hubring.ps.security.guard import Role
from hubring.workers.localrun.server import LocalServer
from hubring.workers.programs.node_launcher import NodeWorker


def train(
    script: Sequence[str],
    *,
    workers: int,
    server: Sequence[str] = (),
    worker: Sequence[str] = (),
    cpus: float = 1,
    gpus: float = 0,
) -> list[dict[str, Any]]:
    """Trains on the Ray cluster that this process is connected to.

    Args:
        script: The script and its arguments; empty: the built-in job.
        workers: Number of workers.
        server: More flags for `ps-server start`.
        worker: More flags for `ps-worker`.
        cpus: Cores that Ray reserves for each worker.
        gpus: GPUs that Ray reserves for each worker.

    Returns:
        The last line of each worker, in rank order. If Ray loses a worker, its entry has `error` and an
        `exit_code` of 1. With a hub the other workers continue.

    Raises:
        ConfigError: Ray is not installed.
        UsageError: The cluster cannot run all workers at the same time.
    """
    require("ray", "on_ray.train")
    import ray

    if not ray.is_initialized():
        ray.init()  # the first remote call would do the same
    _check_room(ray.cluster_resources(), workers, {"CPU": cpus, "GPU": gpus})
    # The server mostly waits. A core reserved for it would be lost to a worker.
    hub = ray.remote(RayServer).options(num_cpus=0).remote(workers, list(server))
    try:
        address = ray.get(hub.address.remote())
        token = ray.get(hub.token.remote())
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(work)
        words = [
            ["--server", address, "--rank", str(rank), *worker, "--", *script] for rank in range(workers)
        ]
        results = [_result(started) for started in [task.remote(each, token) for each in words]]
        # If the job started, its server ends by itself after the last checkpoint. Otherwise it waits forever.
        ray.get(hub.end.remote(None if any("rank" in one for one in results) else 0.0))
        return results
    finally:
        ray.kill(hub)


def _check_room(has: Mapping[str, float], workers: int, each: Mapping[str, float]) -> None:
    """Raises UsageError if the cluster cannot run all workers; a job starts only once all have joined."""
    for kind, wanted in each.items():
        need, available = workers * wanted, has.get(kind, 0.0)
        if need > available:
            raise UsageError(
                f"{workers} worker(s) with {wanted:g} {kind} each need {need:g}, but the Ray cluster has"
                f" {available:g}; reduce workers= or {kind.lower()}s=, or add nodes"
            )


class RayServer:
    """A server on the node where Ray runs this actor.

    Args:
        workers: Number of workers in the job.
        flags: More flags for `ps-server start`.
    """

    def __init__(self, workers: int, flags: Sequence[str]) -> None:
        from ray.util import get_node_ip_address

        self._secrets = TemporaryDirectory(prefix="hubring-")
        self._tokens = Path(self._secrets.name) / "tokens"
        here = ["--host", get_node_ip_address(), "--token-file", str(self._tokens)]
        self._server = LocalServer(workers, [*here, *flags], environment(), verbose=True)

    def address(self) -> str:
        """Returns the server's address."""
        return self._server.address

    def token(self) -> str:
        """Returns the workers' token."""
        return str(token_file.read_tokens(self._tokens)[Role.WORKER])

    def end(self, patience: float | None) -> None:
        """Waits `patience` seconds (None: without limit) until the server ends, then stops it."""
        self._server.end(patience)
        self._secrets.cleanup()


def work(words: Sequence[str], token: str) -> dict[str, Any]:
    """Runs one worker on this node, and returns its last line."""
    with TemporaryDirectory(prefix="hubring-") as secrets, Children[NodeWorker]() as started:
        tokens = Path(secrets) / "tokens"
        private_file.write(tokens, f"{token}\n")
        variables = {**environment(), PARENT_VARIABLE: str(os.getpid()), "PS_TOKEN_FILE": str(tokens)}
        command = module_command("hubring.workers.programs.ps_worker", *words)
        worker = started.add(NodeWorker("the worker", command, variables, SharedScreen(sys.stdout.buffer)))
        result, code = worker.result(), worker.exit_code()
    if worker.code != code:  # a signal ended the worker
        return {"error": worker.ended, "exit_code": code}
    return result or {"error": f"{worker.ended} and no result; see its log", "exit_code": code or 1}


def _result(started: Any) -> dict[str, Any]:
    import ray

    try:
        result: dict[str, Any] = ray.get(started)
    except ray.exceptions.RayError as lost:
        return {"error": str(lost), "exit_code": 1}
    return result
