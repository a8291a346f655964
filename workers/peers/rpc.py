"""torch.distributed.rpc: a parameter server as PyTorch's tutorial writes one, tuned.

A worker sends every slice of its gradients as a call of its own; the call is
answered with the stepped values once all ranks' gradients are there
(`async_execution`), so that slices overlap. They lie on the servers in turn.
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
"""Of 4, 10 and 25 MiB the fastest."""

_THREADS = 4
# What this process serves, as a remote call names a function, not an object.
_ROUNDS: dict[int, Round] = {}
_GATHERING: list[Gathering] = []


class Client:
    """A worker's tie to the servers."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        _join(f"worker-{seat.rank}", seat.servers + seat.rank, seat)

    def gather(self, value: Any) -> list[Any]:
        """What every rank has given, in rank order."""
        values: list[Any] = self._ask(0, gather, self._seat.rank, value)
        return values

    def hold(self, number: int, values: Tensor, optimizer: str) -> None:
        """Gives a slice's first values to its server; for one rank to call."""
        self._ask(number, hold, number, self._seat.size, values, optimizer)

    def push_pull(self, number: int, gradients: Tensor, into: Tensor, hyper: Hyper) -> Callable[[], object]:
        """Sends a slice's gradients, `own` memory; what it returns brings the answer `into` place."""
        told = self._seat.rank, number, gradients, dict(hyper)
        call = rpc.rpc_async(self._server(number), push_pull, told)
        return lambda: into.copy_(call.wait())

    def leave(self) -> None:
        """Returns once all members leave."""
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
    """The same memory as a storage of its own: of a part of a larger one, RPC would send a copy."""
    return torch.from_numpy(flat.numpy())


def serve(number: int, seat: Seat) -> None:
    """Is a server until all workers have left."""
    torch.set_num_threads(1)  # as a shard does
    _GATHERING.append(Gathering(seat.size))
    _join(f"server-{number}", number, seat)
    rpc.shutdown()


def hold(number: int, *told: Any) -> None:
    """On a server: makes the round of a slice, see `Round`."""
    _ROUNDS[number] = Round(*told, keeps=True)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def gather(rank: int, value: Any) -> Future[list[Any]]:
    """On a server: the answer is every rank's value."""
    answer: Future[list[Any]] = Future()
    _GATHERING[0].give(rank, value, answer.set_result)
    return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push_pull(rank: int, number: int, gradients: Tensor, hyper: Hyper) -> Future[Tensor]:
    """On a server: the answer is the slice's values after the step, or the mean."""
    answer: Future[Tensor] = Future()
    _ROUNDS[number].give(rank, (gradients, hyper), answer.set_result)
    return answer


def _join(name: str, place: int, seat: Seat) -> None:
    """Makes this process a member of the RPC group.

    Args:
        name: Under which others call it.
        place: Among servers and workers, servers first.
        seat: Names the meeting place and how many members there are.

    Raises:
        RingBroken: They did not find each other.
    """
    talk_through(seat.host)
    # torch's first choice, its transport over shared memory, spins while it waits, where workers compute.
    # cma reads the sender's memory, past the link of a host that is a namespace.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS,
        rpc_timeout=seat.timeout,
        init_method=seat.init_method,
        _transports=["uv"],
        _channels=["cma", "basic"] if seat.host is None else ["basic"],
    )
    told = {"rank": place, "world_size": seat.servers + seat.size, "rpc_backend_options": options}
    try:
        rpc.init_rpc(name, **told)  # type: ignore[no-untyped-call]
    except RuntimeError as cause:
        raise RingBroken(f"{name} did not find the others at {seat.meet}: {cause}") from cause
