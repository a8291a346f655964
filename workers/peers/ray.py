"""Ray's parameter-server pattern: an actor averages the gradients of all ranks and steps the optimizer.

Each worker is a driver of a Ray cluster on this machine. The cluster belongs to one run: it listens on
loopback, and requires a token from the run's folder. Arrays go through Ray's object store in shared memory.
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hubring.ps.config import terminal
from hubring.ps.config.environment import export
from hubring.ps.core.errors import HubringError, ServerUnreachable
from hubring.ps.core.types import StepHyper
from hubring.workers.peers.rendezvous import PeerRendezvous
from hubring.workers.peers.rpc import RankGathering, SliceRound

Array = NDArray[np.floating[Any]]

_NAMESPACE = "hubring"
_ACTOR = "server"
_QUIET: dict[str, Any] = {"namespace": _NAMESPACE, "log_to_driver": False, "logging_level": "error"}


class RayClient:
    """A worker's client of the actor."""

    def __init__(self, seat: PeerRendezvous) -> None:
        self._rank, self._timeout = seat.rank, seat.timeout
        meet = Path(seat.meet)
        _use_token(meet)
        import ray

        self._ray = ray
        try:
            ray.init(meet.read_text(), **_QUIET)
            self._server = ray.get_actor(_ACTOR)
        except (OSError, RuntimeError, ValueError) as cause:
            raise ServerUnreachable(f"rank {seat.rank} cannot reach Ray at {meet}: {cause}") from cause

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order."""
        values: list[Any] = self._ask("gather", self._rank, value)
        return values

    def hold(
        self, number: int, values: Tensor, optimizer: str, parameters: Sequence[slice] | None = None
    ) -> None:
        """Sends a slice's initial values to the actor. One rank must call this for each slice."""
        self._ask("hold", number, values.numpy(), optimizer, parameters)

    def push_pull(
        self, number: int, gradients: Tensor, into: Tensor, hyper: StepHyper
    ) -> Callable[[], object]:
        """Sends a slice's gradients; the returned function waits for the answer and writes it to `into`."""
        answer = self._server.push_pull.remote(self._rank, number, gradients.numpy(), hyper)
        return lambda: np.copyto(into.numpy(), self._ray.get(answer, timeout=self._timeout))

    def leave(self) -> None:
        """Leaves the job; the actor ends once all workers have left."""
        self._ask("leave")
        self._ray.shutdown()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._ray.get(getattr(self._server, method).remote(*arguments), timeout=self._timeout)
        except self._ray.exceptions.RayError as cause:
            raise HubringError(f"the Ray parameter server did not answer {method}: {cause}") from cause


class RayActor:
    """Runs in Ray's process. Every call is a coroutine of one event loop.

    Args:
        size: Number of workers.
    """

    def __init__(self, size: int) -> None:
        # Arrays from Ray are read-only, and torch warns about that.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        torch.set_num_threads(1)  # the same as a shard
        self._size = self._staying = size
        self._gathering = RankGathering(size)
        self._rounds: dict[int, SliceRound] = {}
        self._all_left = asyncio.Event()

    async def hold(
        self, number: int, values: Array, optimizer: str, parameters: Sequence[slice] | None = None
    ) -> None:
        """Creates the round of a slice; see `SliceRound`."""
        self._rounds[number] = SliceRound(
            self._size, torch.from_numpy(values), optimizer, parameters, keeps=False
        )

    async def gather(self, rank: int, value: Any) -> list[Any]:
        """Returns every rank's value."""
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._gathering.give(rank, value, answer.set_result)
        return await answer

    async def push_pull(self, rank: int, number: int, gradients: Array, hyper: StepHyper) -> Array:
        """Returns the slice's values after the step, or the mean."""
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._rounds[number].give(rank, (torch.from_numpy(gradients), hyper), answer.set_result)
        values: Array = (await answer).numpy()
        return values

    async def leave(self) -> None:
        """Records that a worker has left."""
        self._staying -= 1
        if not self._staying:
            self._all_left.set()

    async def end(self) -> None:
        """Returns once all workers have left."""
        await self._all_left.wait()


def serve(seat: PeerRendezvous) -> None:
    """Runs a cluster with the actor until all workers have left; writes its address to `seat.meet`."""
    meet = Path(seat.meet)
    token = _use_token(meet)
    token.touch(0o600)
    token.write_text(secrets.token_hex())
    import ray

    with TemporaryDirectory(prefix="hubring-ray-", ignore_cleanup_errors=True) as place:
        own: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "_temp_dir": place}
        ray.init(**own, **_QUIET, include_dashboard=False)
        terminal.unwind_on_sigterm()
        try:
            actor = ray.remote(RayActor).options(name=_ACTOR, num_cpus=0).remote(seat.size)
            meet.write_text(ray.get_runtime_context().gcs_address)
            ray.get(actor.end.remote())
        finally:
            ray.shutdown()  # ends all processes of the cluster
            token.unlink()


def _use_token(meet: Path) -> Path:
    """Makes Ray use this run's token. Call this before importing ray. Returns the token file."""
    token = meet.with_suffix(".token")
    export({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    return token
