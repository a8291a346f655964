"""torch.distributed.rpc: the parameter server of PyTorch's tutorial, tuned.

A worker sends each slice of its gradients in a separate call. The server answers with the stepped values once
it has the gradients of all ranks (`async_execution`), so that slices overlap. Slices go to the servers
round-robin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.types import Hyper
from hubring.workers.peers.interface import talk_through
from hubring.workers.peers.seat import Seat
from hubring.workers.peers.server import Gathering, Round

SLICE_BYTES = 4 << 20
"""The fastest of 4, 10 and 25 MiB."""

_THREADS = 4
# State of this server process. It is global because a remote call names a function, not an object.
_ROUNDS: dict[int, Round] = {}
_GATHERING: list[Gathering] = []


class Client:
    """A worker's client of the servers."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        _join(f"worker-{seat.rank}", seat.servers + seat.rank, seat)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order."""
        values: list[Any] = self._ask(0, gather, self._seat.rank, value)
        return values

    def hold(self, number: int, values: Tensor, optimizer: str) -> None:
        """Sends a slice's initial values to its server. One rank must call this for each slice."""
        self._ask(number, hold, number, self._seat.size, values, optimizer)

    def push_pull(self, number: int, gradients: Tensor, into: Tensor, hyper: Hyper) -> Callable[[], object]:
        """Sends a slice's gradients; the returned function waits for the answer and writes it to `into`.

        Pass the result of `own` as gradients, or RPC sends a copy.
        """
        arguments = self._seat.rank, number, gradients, dict(hyper)
        call = rpc.rpc_async(self._server(number), push_pull, arguments)
        return lambda: into.copy_(call.wait())

    def leave(self) -> None:
        """Leaves the group; returns once all members leave."""
        rpc.shutdown()

    def _server(self, number: int) -> str:
        return f"server-{number % self._seat.servers}"

    def _ask(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        server = self._server(number)
        try:
            return rpc.rpc_sync(server, function, arguments)
        except RuntimeError as cause:
            raise HubringError(f"{server} did not answer {function.__name__}: {cause}") from cause


def own(flat: Tensor) -> Tensor:
    """Returns the same memory as a separate storage. RPC would send a copy of a part of a larger storage."""
    return torch.from_numpy(flat.numpy())


def serve(number: int, seat: Seat) -> None:
    """Runs a server until all workers have left."""
    torch.set_num_threads(1)  # the same as a shard
    _GATHERING.append(Gathering(seat.size))
    _join(f"server-{number}", number, seat)
    rpc.shutdown()


def hold(number: int, *arguments: Any) -> None:
    """On a server: creates the round of a slice; see `Round`."""
    _ROUNDS[number] = Round(*arguments, keeps=True)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def gather(rank: int, value: Any) -> Future[list[Any]]:
    """On a server: answers with the values of all ranks."""
    answer: Future[list[Any]] = Future()
    _GATHERING[0].give(rank, value, answer.set_result)
    return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push_pull(rank: int, number: int, gradients: Tensor, hyper: Hyper) -> Future[Tensor]:
    """On a server: answers with the slice's values after the step, or with the mean."""
    answer: Future[Tensor] = Future()
    _ROUNDS[number].give(rank, (gradients, hyper), answer.set_result)
    return answer


def _join(name: str, place: int, seat: Seat) -> None:
    """Joins the RPC group.

    Args:
        name: The name under which other members call this process.
        place: Rank in the group; servers come first.
        seat: The rendezvous and the number of members.

    Raises:
        RingBroken: The members could not connect.
    """
    talk_through(seat.host)
    # torch prefers its shared-memory transport, which spins while it waits and takes cores from the workers.
    # cma reads the sender's memory, which would bypass the link of a host that is a network namespace.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS,
        rpc_timeout=seat.timeout,
        init_method=seat.init_method,
        _transports=["uv"],
        _channels=["cma", "basic"] if seat.host is None else ["basic"],
    )
    group = {"rank": place, "world_size": seat.servers + seat.size, "rpc_backend_options": options}
    try:
        rpc.init_rpc(name, **group)  # type: ignore[no-untyped-call]
    except RuntimeError as cause:
        raise RingBroken(f"{name} could not join the other members at {seat.meet}: {cause}") from cause
