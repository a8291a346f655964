"""torch.distributed.rpc: the parameter server of PyTorch's tutorial, tuned.

A worker sends each slice of its gradients in a separate call. The server answers with the stepped values once
it has the gradients of all ranks (`async_execution`), so that slices overlap. Slices go to the servers
round-robin. The server's logic, which `ray` shares, does no I/O: each library passes in the values and sends
the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.types import StepHyper
from hubring.ps.optim.blocks import BlockSteps
from hubring.workers.peers.rendezvous import PeerRendezvous, talk_through

Answer = Callable[[Any], object]
"""Called once with a rank's answer."""


class RankGathering:
    """Collects one value from every rank. The last rank's call answers all ranks; then a new round starts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._given: dict[int, Any] = {}
        self._answers: list[Answer] = []

    def give(self, rank: int, value: Any, answer: Answer) -> None:
        """Adds a rank's value; the answer is the same for all ranks."""
        with self._lock:
            self._take(rank, value)
            self._answers.append(answer)
            if len(self._answers) < self._size:
                return
            outcome, answers, self._answers = self._outcome(), self._answers, []
        for each in answers:
            each(outcome)

    def _take(self, rank: int, value: Any) -> None:
        self._given[rank] = value

    def _outcome(self) -> Any:
        given, self._given = self._given, {}
        return [given[rank] for rank in range(self._size)]


class SliceRound(RankGathering):
    """Sums a slice's gradients, given as `(gradients, hyper)`, and steps it; answers with the slice's values.

    Args:
        size: Number of ranks.
        values: The initial values; copied.
        optimizer: Name of the optimizer; empty: the answer is the mean.
        parameters: The elements of each parameter in the slice; None if it has one.
        keeps: Whether the round owns the gradients and writes to them; otherwise it only reads them.
    """

    def __init__(
        self,
        size: int,
        values: Tensor,
        optimizer: str,
        parameters: Sequence[slice] | None = None,
        *,
        keeps: bool,
    ) -> None:
        super().__init__(size)
        self._values = values.clone()
        self._steps = (
            BlockSteps(optimizer, self._values, finite=False, parameters=parameters) if optimizer else None
        )
        self._keeps = keeps
        self._sum = torch.empty_like(values)
        self._hyper: StepHyper = {}
        self._scratch = torch.empty_like(values)

    def _take(self, rank: int, value: tuple[Tensor, StepHyper]) -> None:
        gradients, self._hyper = value
        if self._answers:
            self._sum.add_(gradients)
        elif self._keeps:
            self._sum = gradients
        else:
            self._sum.copy_(gradients)

    def _outcome(self) -> Tensor:
        if self._steps is None:
            torch.div(self._sum, self._size, out=self._values)
        else:
            self._steps.step([self._sum.div_(self._size)], self._hyper, self._scratch)
        return self._values


SLICE_BYTES = 4 << 20
"""The fastest of 4, 10 and 25 MiB."""

_THREADS = 4
# State of this server process. It is global because a remote call names a function, not an object.
_ROUNDS: dict[int, SliceRound] = {}
_GATHERING: list[RankGathering] = []


class RpcClient:
    """A worker's client of the servers."""

    def __init__(self, seat: PeerRendezvous) -> None:
        self._seat = seat
        _join(f"worker-{seat.rank}", seat.servers + seat.rank, seat)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order."""
        values: list[Any] = self._ask(0, gather, self._seat.rank, value)
        return values

    def hold(
        self, number: int, values: Tensor, optimizer: str, parameters: Sequence[slice] | None = None
    ) -> None:
        """Sends a slice's initial values to its server. One rank must call this for each slice."""
        self._ask(number, hold, number, self._seat.size, values, optimizer, parameters)

    def push_pull(
        self, number: int, gradients: Tensor, into: Tensor, hyper: StepHyper
    ) -> Callable[[], object]:
        """Sends a slice's gradients; the returned function waits for the answer and writes it to `into`.

        Pass the result of `own` as gradients, or RPC sends a copy.
        """
        arguments = self._seat.rank, number, gradients, hyper
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


def serve(number: int, seat: PeerRendezvous) -> None:
    """Runs a server until all workers have left."""
    torch.set_num_threads(1)  # the same as a shard
    _GATHERING.append(RankGathering(seat.size))
    _join(f"server-{number}", number, seat)
    rpc.shutdown()


def hold(number: int, *arguments: Any) -> None:
    """On a server: creates the round of a slice; see `Round`."""
    _ROUNDS[number] = SliceRound(*arguments, keeps=True)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def gather(rank: int, value: Any) -> Future[list[Any]]:
    """On a server: answers with the values of all ranks."""
    answer: Future[list[Any]] = Future()
    _GATHERING[0].give(rank, value, answer.set_result)
    return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push_pull(rank: int, number: int, gradients: Tensor, hyper: StepHyper) -> Future[Tensor]:
    """On a server: answers with the slice's values after the step, or with the mean."""
    answer: Future[Tensor] = Future()
    _ROUNDS[number].give(rank, (gradients, hyper), answer.set_result)
    return answer


def _join(name: str, place: int, seat: PeerRendezvous) -> None:
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
