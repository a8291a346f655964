"""Collectives on the hub: one contribution from every live rank in, one result for each out.

Law: ranks meet by name. A round closes when all live ranks have contributed, in
whatever order, and is computed in rank order, so a rerun is bitwise equal.
Either every rank gets the result or every rank is told why there is none. A
sender's last reply under a name is kept, so that a retry is answered as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ps.messages import Code, Collective, Contribute, Delivery, ReduceOp, Refusal, Reply, Result, Ticket
from ps.types import Sender

Live = Mapping[int, int]
"""Who takes part: incarnation by rank."""


class _Part(NamedTuple):
    request: Contribute
    tickets: list[Ticket]
    """One for every try."""


class _Answered(NamedTuple):
    sequence: int
    reply: Reply


KEPT = 1024
"""Replies kept for retries: far more than any worker has under way."""


class RoundBook:
    """All rounds that are open, and the last reply under each name."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, _Part]] = {}
        self._last: dict[tuple[Sender, str], _Answered] = {}

    def contribute(self, request: Contribute, ticket: Ticket, live: Live) -> list[Delivery]:
        """Takes a live sender's part, or its retry of one; answers all whose round this closes."""
        answered = self._last.get((request.sender, request.name))
        if answered is not None and request.sequence <= answered.sequence:
            return [Delivery(ticket, _again(request, answered))]
        parts = self._open.setdefault(request.name, {})
        earlier = parts.get(request.sender.rank)
        if earlier is not None and earlier.request.sequence != request.sequence:
            return [Delivery(ticket, _too_early(request, earlier.request))]
        tickets = earlier.tickets if earlier is not None else []
        parts[request.sender.rank] = _Part(request, [*tickets, ticket])
        return self._close_if_full(request.name, live)

    def on_view(self, live: Live) -> list[Delivery]:
        """Leaves out whoever is not live any more, and closes the rounds that waited only for them."""
        self._last = {
            (sender, name): answered
            for (sender, name), answered in self._last.items()
            if live.get(sender.rank) == sender.incarnation
        }
        deliveries = []
        for name, parts in list(self._open.items()):
            for rank, (request, tickets) in list(parts.items()):
                if live.get(rank) != request.sender.incarnation:
                    del parts[rank]
                    text = f"rank {rank} lost its place while it waited in {name!r}; start the worker again"
                    deliveries += [Delivery(ticket, Refusal(Code.FENCED, text)) for ticket in tickets]
            deliveries += self._close_if_full(name, live)
        return deliveries

    def refuse_all(self, refusal: Refusal) -> list[Delivery]:
        """Gives up every open round."""
        parts = [part for parts in self._open.values() for part in parts.values()]
        self._open.clear()
        return [Delivery(ticket, refusal) for part in parts for ticket in part.tickets]

    def _close_if_full(self, name: str, live: Live) -> list[Delivery]:
        parts = self._open[name]
        if parts and not live.keys() <= parts.keys():
            return []
        del self._open[name]
        if not parts:
            return []
        reply = _outcome([parts[rank].request for rank in sorted(parts)])
        for request, _ in parts.values():
            self._remember(request, reply)
        return [Delivery(ticket, reply) for part in parts.values() for ticket in part.tickets]

    def _remember(self, request: Contribute, reply: Reply) -> None:
        """Keeps a reply for a retry; names that change from step to step push out the oldest."""
        key = (request.sender, request.name)
        self._last.pop(key, None)
        self._last[key] = _Answered(request.sequence, reply)
        if len(self._last) > KEPT:
            del self._last[next(iter(self._last))]


def _again(request: Contribute, answered: _Answered) -> Reply:
    if request.sequence == answered.sequence:
        return answered.reply
    return Refusal(
        Code.OUT_OF_ORDER,
        f"rank {request.sender.rank} sent round {request.sequence} of {request.name!r} after its round"
        f" {answered.sequence} was answered; count the rounds of a name upward",
    )


def _too_early(request: Contribute, earlier: Contribute) -> Refusal:
    return Refusal(
        Code.OUT_OF_ORDER,
        f"rank {request.sender.rank} sent round {request.sequence} of {request.name!r} while its round"
        f" {earlier.sequence} is open; wait for one, or give the other another name",
    )


def _outcome(parts: list[Contribute]) -> Reply:
    """What a full round gives every rank; `parts` in rank order."""
    if len({_must_agree(part) for part in parts}) > 1:
        sent = "; ".join(f"rank {part.sender.rank} sent {_spell(part)}" for part in parts)
        text = f"ranks disagree in {parts[0].name!r}: {sent}. Let all of them make the same call"
        return Refusal(Code.MISMATCH, text)
    if parts[0].collective is Collective.BARRIER:
        return Result()
    if parts[0].collective is Collective.BROADCAST:
        return _broadcast(parts)
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if len(tensors) < len(parts):  # they agree, so nobody sent one
        return Refusal(Code.BAD_REQUEST, f"{parts[0].name!r}: {_spell(parts[0])}; give every rank a tensor")
    if parts[0].collective is Collective.ALLGATHER:
        return Result(torch.cat([tensor.reshape(tensor.shape or (1,)) for tensor in tensors]))
    return _allreduce(parts[0], tensors)


def _must_agree(part: Contribute) -> tuple[object, ...]:
    """In what the ranks of a round must not differ."""
    layout = None if part.tensor is None else (part.tensor.dtype, part.tensor.shape)
    match part.collective:
        case Collective.ALLREDUCE:
            return part.collective, part.op, layout
        case Collective.ALLGATHER:
            # The first dimension may vary; one without any counts as one element.
            return part.collective, layout and (layout[0], layout[1][1:])
        case Collective.BROADCAST:
            return part.collective, part.root
        case Collective.BARRIER:
            return (part.collective,)


def _spell(part: Contribute) -> str:
    words = [part.collective.name.lower()]
    if part.collective is Collective.ALLREDUCE:
        words.append(part.op.name.lower())
    if part.collective is Collective.BROADCAST:
        words.append(f"from rank {part.root}")
    if part.tensor is not None:
        words.append(f"{str(part.tensor.dtype).removeprefix('torch.')}{list(part.tensor.shape)}")
    elif part.collective is not Collective.BARRIER:
        words.append("without a tensor")
    return " ".join(words)


def _broadcast(parts: list[Contribute]) -> Reply:
    root = next((part for part in parts if part.sender.rank == parts[0].root), None)
    if root is None or root.tensor is None:
        ranks = ", ".join(str(part.sender.rank) for part in parts)
        why = "takes no part in it" if root is None else "gave no tensor"
        text = f"broadcast {parts[0].name!r}: root {parts[0].root} {why}; ranks taking part: {ranks}"
        return Refusal(Code.BAD_REQUEST, text)
    # A copy: the root's memory is its own again as soon as it has its reply.
    return Result(root.tensor.clone())


def _allreduce(first: Contribute, tensors: list[Tensor]) -> Reply:
    if first.op is ReduceOp.AVERAGE and not tensors[0].is_floating_point():
        text = f"{first.name!r}: no average of {tensors[0].dtype}; sum it, or convert it to a floating dtype"
        return Refusal(Code.BAD_REQUEST, text)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        _reduce_into(total, tensor, first.op)
    if first.op is ReduceOp.AVERAGE:
        total.div_(len(tensors))
    return Result(total)


def _reduce_into(total: Tensor, tensor: Tensor, op: ReduceOp) -> None:
    match op:
        case ReduceOp.SUM | ReduceOp.AVERAGE:
            total.add_(tensor)
        case ReduceOp.PRODUCT:
            total.mul_(tensor)
        case ReduceOp.MIN:
            torch.minimum(total, tensor, out=total)
        case ReduceOp.MAX:
            torch.maximum(total, tensor, out=total)
