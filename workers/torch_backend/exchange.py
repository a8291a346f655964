"""The exchange of a group through the hub's collectives.

Members are named by their rank in the group, which is the order of the script's list. The hub knows them by
their rank in the job, in ascending order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hubring.ps.core import messages
from hubring.ps.core.errors import ConfigError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.workers.communicators.base import CollectiveWork, Communicator
from hubring.workers.communicators.host.base import GroupExchange
from hubring.workers.communicators.host.reductions import TorchReduction


class HubGroupExchange(GroupExchange):
    """Exchanges through the hub's collectives.

    Args:
        communicator: Connects this process to the job.
        name: The group's name, the same for all members.
        ranks: The members' ranks in the job.
        own: This member's rank in the group.
    """

    def __init__(self, communicator: Communicator, name: str, ranks: Sequence[int], own: int) -> None:
        self._communicator = communicator
        self._name = name
        self._ranks = ranks
        self._own = own
        self._order = sorted(range(len(ranks)), key=ranks.__getitem__)
        """The members in the order of their ranks in the job."""
        self._members = () if len(ranks) == communicator.size else tuple(sorted(ranks))
        self._numbers = itertools.count()
        self._work: CollectiveWork | None = None
        self._closed = ""

    def reduce(self, flat: Tensor, op: TorchReduction) -> None:
        hub_op = op.hub_op(flat.dtype)
        if hub_op is None:
            parts = [torch.empty_like(flat) for _ in self._ranks]
            self.allgather(flat.view(torch.uint8), [part.view(torch.uint8) for part in parts])
            op.reduce_all(parts, flat)
            return
        # A hub goes on without a lost worker. So each member marks its place.
        mark = int(hub_op in (messages.ReduceOp.SUM, messages.ReduceOp.MAX))
        places = torch.full((len(self._ranks),), 1 - mark, dtype=torch.int32, device="cpu")
        places[self._own] = mark
        total, places = self._finish(self._call(Collective.ALLREDUCE, flat, places, op=hub_op))
        self._check_lost([member for member, one in enumerate(places.tolist()) if one == 1 - mark])
        flat.copy_(total)
        op.divide(flat, len(self._ranks))

    def broadcast(self, data: Tensor, root: int) -> None:
        given = [data] if root == self._own else []
        came = self._finish(self._call(Collective.BROADCAST, *given, root=self._ranks[root]))
        if root != self._own:
            self._fit(came[0], [data])

    def allgather(self, own: Tensor, into: Sequence[Tensor]) -> None:
        (whole,) = self._finish(self._call(Collective.ALLGATHER, own))
        self._fit(whole, [into[member] for member in self._order])

    def alltoall(self, sent: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        splits = tuple(sent[member].numel() for member in self._order)
        rows = torch.cat([sent[member] for member in self._order])
        whole, _ = self._finish(self._call(Collective.ALLTOALL, rows, splits=splits))
        self._fit(whole, [into[member] for member in self._order])

    def gather(self, own: bytes) -> list[bytes]:
        """Returns what all members pass, of equal lengths."""
        data = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        into = [torch.empty_like(data) for _ in self._ranks]
        self.allgather(data, into)
        return [bytes(one.numpy()) for one in into]

    def close(self, reason: str) -> None:
        work, self._closed = self._work, reason
        if work is not None:
            work.fail(RingBroken(reason))

    def _call(
        self,
        collective: Collective,
        *tensors: Tensor,
        op: messages.ReduceOp = messages.ReduceOp.SUM,
        root: int = 0,
        splits: tuple[int, ...] = (),
    ) -> CollectiveWork:
        call = Call(collective, f"{self._name} {next(self._numbers)}", op, root, self._members, splits)
        self._work = work = self._communicator.collective(call, *tensors, then=list)
        if self._closed:
            work.fail(RingBroken(self._closed))
        return work

    def _finish(self, work: CollectiveWork) -> list[Tensor]:
        came: list[Tensor] = work.get(self.timeout)
        return came

    def _fit(self, whole: Tensor, into: Sequence[Tensor]) -> None:
        """Cuts the received bytes."""
        sizes = [one.numel() for one in into]
        if whole.numel() != sum(sizes):
            (live,) = self._finish(self._call(Collective.ALLGATHER, torch.tensor([self._own], device="cpu")))
            self._check_lost(sorted({*range(len(self._ranks))} - {*live.tolist()}))
            raise ConfigError(
                f"{self._name}: received {whole.numel()} bytes, expected {sum(sizes)}: pass tensors of equal"
                " sizes on all ranks, or the sizes that the other ranks send"
            )
        for one, part in zip(into, whole.split(sizes), strict=True):
            one.copy_(part)

    def _check_lost(self, members: Sequence[int]) -> None:
        if members:
            lost = ", ".join(str(self._ranks[member]) for member in members)
            raise RingBroken(
                f"rank {lost} is lost, or has left the job, and {self._name} needs it: restart the job"
            )
