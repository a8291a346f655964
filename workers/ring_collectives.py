"""Collectives on the ring: all ranks first tell what they are about to do, then do it.

The telling costs a round of small messages and spares what process groups do
with ranks that disagree: hang, crash, or mix up bytes. It waits for all ranks,
so that it is a barrier too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ps.errors import ConfigError
from ps.messages import Collective, ReduceOp
from workers.ring import Ring

REDUCTIONS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
"""The average is a sum, divided afterwards: Gloo has none."""

_WIDER = {torch.bool: torch.int32, torch.int16: torch.int32}
"""What is reduced in place of a dtype that a backend cannot; a bool's sum is whether any is true."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank is about to do; dtype and shape are empty where it gives no tensor."""

    collective: int
    name: str
    op: int
    root: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def must_agree(self) -> tuple[object, ...]:
        """In what the ranks of one round must not differ."""
        match Collective(self.collective):
            case Collective.ALLREDUCE:
                return self.name, self.collective, self.op, self.dtype, self.shape
            case Collective.ALLGATHER:
                return self.name, self.collective, self.dtype, self.shape[1:]
            case Collective.BROADCAST:
                return self.name, self.collective, self.root
            case Collective.BARRIER:
                return self.name, self.collective

    def __str__(self) -> str:
        words = [Collective(self.collective).name.lower(), repr(self.name)]
        if self.collective == Collective.ALLREDUCE:
            words.append(ReduceOp(self.op).name.lower())
        if self.collective == Collective.BROADCAST:
            words.append(f"from rank {self.root}")
        return " ".join([*words, f"{self.dtype}{list(self.shape)}"] if self.dtype else words)


def run(
    ring: Ring, collective: Collective, tensor: torch.Tensor | None, name: str, op: ReduceOp, root: int
) -> torch.Tensor | None:
    """Performs one collective and waits for it.

    Returns:
        A new tensor on the ring's device; None for a barrier.

    Raises:
        ConfigError: Ranks disagree, or this cannot be done with the dtype; the same on all ranks.
        DeadlineExceeded: Some rank did not take part in time.
        RingBroken: Some rank is gone.
    """
    if tensor is not None and tensor.dim() == 0 and collective is Collective.ALLGATHER:
        tensor = tensor.reshape(1)
    mine = None if tensor is None else tensor.detach().to(ring.device).contiguous()
    dtype = "" if mine is None else str(mine.dtype).removeprefix("torch.")
    shape = () if mine is None else tuple(mine.shape)
    calls = _agree(ring, Call(collective, name, op, root, dtype, shape))
    match collective:
        case Collective.ALLREDUCE:
            return _allreduce(ring, mine, calls[0])
        case Collective.ALLGATHER:
            return _allgather(ring, mine, calls)
        case Collective.BROADCAST:
            return _broadcast(ring, mine, calls[root])
        case Collective.BARRIER:
            return None


def _agree(ring: Ring, call: Call) -> list[Call]:
    """Every rank's call, once they are known to fit."""
    calls = [_decode(told) for told in ring.gather(str(call), _encode(call))]
    if len({one.must_agree for one in calls}) > 1:
        all_of_them = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(calls))
        raise ConfigError(
            f"ranks disagree on a collective: {all_of_them}. Let all of them make the same call"
        )
    return calls


def _encode(call: Call) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(asdict(call)).encode()), dtype=torch.uint8)


def _decode(told: torch.Tensor) -> Call:
    fields = json.loads(bytes(told.tolist()))
    return Call(**{**fields, "shape": tuple(fields["shape"])})


def _allreduce(ring: Ring, mine: torch.Tensor | None, call: Call) -> torch.Tensor:
    if mine is None:
        raise ConfigError(f"{call}: every rank must give a tensor")
    if call.op == ReduceOp.AVERAGE and not mine.is_floating_point():
        raise ConfigError(f"{call}: no average of {mine.dtype}; sum it, or convert it to a floating dtype")
    total = mine.to(_WIDER.get(mine.dtype, mine.dtype), copy=True)
    reduce_into(ring, total, ReduceOp(call.op), str(call))
    return total.to(mine.dtype)


def reduce_into(ring: Ring, total: torch.Tensor, op: ReduceOp, what: str) -> None:
    """Reduces in place over all ranks, and waits."""
    options = dist.AllreduceOptions()
    options.reduceOp = REDUCTIONS[op]  # type: ignore[assignment]
    ring.run(what, lambda group: group.allreduce([total], options))
    if op is ReduceOp.AVERAGE:
        total.div_(ring.size)


def _allgather(ring: Ring, mine: torch.Tensor | None, calls: list[Call]) -> torch.Tensor:
    if mine is None:
        raise ConfigError(f"{calls[0]}: every rank must give a tensor")
    pieces = ring.gather(str(calls[0]), mine.reshape(-1).view(torch.uint8))
    parts = zip(pieces, calls, strict=True)
    return torch.cat([piece.view(mine.dtype).view(call.shape) for piece, call in parts])


def _broadcast(ring: Ring, mine: torch.Tensor | None, given: Call) -> torch.Tensor:
    if not given.dtype:
        raise ConfigError(f"{given}: the root must give a tensor")
    if ring.rank == given.root and mine is not None:
        result = mine.clone()
    else:
        result = torch.empty(given.shape, dtype=getattr(torch, given.dtype), device=ring.device)
    broadcast_into(ring, result.view(-1).view(torch.uint8), given.root, str(given))
    return result


def broadcast_into(ring: Ring, tensor: torch.Tensor, root: int, what: str) -> None:
    """Overwrites a tensor with the root's, and waits."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    if tensor.numel():
        ring.run(what, lambda group: group.broadcast([tensor], options))
